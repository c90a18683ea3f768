"""`push`: bring a step from a run's directory into a remote tier."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.checkpoint.transfer import Transfer
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import write_upload_manifest
from mpi_ckpt.storage.shard_stream import send_shards
from mpi_ckpt.tools import remote, status, text
from mpi_ckpt.tools.locate import find_whole, reading, size_of_files
from mpi_ckpt.tools.progress import Advance, progress

HELP = "upload a step to a remote tier"
DESCRIPTION = """Upload the newest committed step of RUN_DIR (or --step) to --remote: every shard, compared with its
sha256 on the way, and the upload manifest last. Shards that are there already are not sent again, so that an upload
that was interrupted goes on; should `verify --remote` find them damaged, send them with --again. Works beside a running
job; nothing is deleted on either side."""
EXAMPLE = "python -m mpi_ckpt push runs/demo --remote s3://bucket/demo"


def push(
    directory: Path, store: ObjectStore, advance: Advance = lambda nbytes: None, *, again: bool = False
) -> tuple[int, int]:
    """**Local.** Upload the committed step in `directory`; the step, and the bytes sent. `again`: every byte of it.

    Raises NoCheckpoint, MissingShard, CorruptShard, InvalidManifest, RemoteFailed.
    """
    with reading(directory):
        manifest = read_manifest(directory)
        sent = send_shards(store, directory, manifest, slice(None), advance, again=again)
    write_upload_manifest(store, manifest)
    return manifest.step, sent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    remote.add_remote(parser)
    text.add_step(parser)
    parser.add_argument("--again", action="store_true", help="send every shard, whether or not it is there")
    parser.add_argument(
        "--bandwidth", metavar="SIZE", type=text.parse_size, help="bytes a second to send at most, such as 20MB"
    )
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Push; the exit status."""
    directory = find_whole(arguments.run_dir, arguments.step)
    store = remote.opened(arguments.remote)
    remote.check_same_run(store, arguments.run_dir)
    transfer = Transfer(arguments.bandwidth, nice=0)
    with progress("push", size_of_files(directory)) as advance:

        def pace(nbytes: int) -> None:
            transfer.pace(nbytes)
            advance(nbytes)

        step, sent = push(directory, store, pace, again=arguments.again)
    if arguments.json:
        text.print_json({"step": step, "remote": store.url, "sent_nbytes": sent})
    else:
        print(f"step {step} is in {store.url}; {text.size(sent)} sent")
    return status.WELL
