"""`push`: bring a step from a run's directory into a remote tier."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.checkpoint.transfer import Transfer
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import write_upload_manifest
from mpi_ckpt.storage.run_file import RUN_FILE
from mpi_ckpt.storage.shard_stream import send_shards
from mpi_ckpt.tools import homecoming, remote, status, text
from mpi_ckpt.tools.locate import find_whole, reading, size_of_files
from mpi_ckpt.tools.progress import Advance, progress

HELP = "upload a step to a remote tier"
DESCRIPTION = """Upload the newest committed step of RUN_DIR (or --step) to --remote: every shard, compared with its
sha256 on the way, and the upload manifest last. Shards that are there already are not sent again, so that an upload
that was interrupted goes on; should `verify --remote` find them damaged, send them with --again. A run of the trainer
brings its run.json along where there is none, so that a launch goes on from there; a remote tier with another run's
steps is refused. Works beside a running job; nothing is deleted on either side."""
EXAMPLE = "python -m mpi_ckpt push runs/demo --remote s3://bucket/demo"


def push(
    directory: Path, store: ObjectStore, advance: Advance = lambda nbytes: None, *, again: bool = False
) -> tuple[int, int]:
    """**Local.** Upload the committed step in `directory`; the step, and the bytes sent. `again`: every byte of it.

    Raises NoCheckpoint, MissingShard, CorruptShard, InvalidManifest, RemoteFailed, UnusableOption where the store holds
    another run's steps.
    """
    with reading(directory):
        manifest = read_manifest(directory)
        _introduce(directory, manifest, store)
        sent = send_shards(store, directory, manifest, slice(None), advance, again=again)
    write_upload_manifest(store, manifest)
    return manifest.step, sent


def _introduce(directory: Path, manifest: ShardManifest, store: ObjectStore) -> None:
    """See that the store is of the step's own run, and that it has the `run.json` without which no launch goes on."""
    held = store.get(RUN_FILE)
    there = homecoming.readable(f"{store.url}/{RUN_FILE}", held and held[0])
    homecoming.check_same_run(directory.parent, there, remote.OTHER_RUN)
    if not homecoming.is_of_trainer(manifest):
        return
    mine = homecoming.own_run_file(directory.parent, there)
    known = [file.settings for file in (mine, there) if file]
    homecoming.check_settings(manifest, directory, known if there else [*known, *remote.newest_settings(store)])
    if mine and not there and not store.put(RUN_FILE, mine.data, held and held[1]):  # or another was quicker
        homecoming.check_same_run(directory.parent, remote.run_file(store), remote.OTHER_RUN)


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
