"""`push`: bring a step from a run's directory into a remote tier."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.checkpoint import remote as remote_tier
from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import remote_step, write_upload_manifest
from mpi_ckpt.storage.shard_stream import send_shard
from mpi_ckpt.tools import remote, status, text
from mpi_ckpt.tools.locate import checkpoints_root, reading, size_of_files
from mpi_ckpt.tools.progress import Advance, progress

HELP = "upload a step to a remote tier"
DESCRIPTION = """Upload the newest committed step of RUN_DIR (or --step) to --remote: every shard, compared with its
sha256 on the way, and the upload manifest last. Shards that are there already are not sent again, so that an upload
that was interrupted goes on. Works beside a running job; nothing is deleted on either side."""
EXAMPLE = "python -m mpi_ckpt push runs/demo --remote s3://bucket/demo"


def push(directory: Path, store: ObjectStore, advance: Advance = lambda nbytes: None) -> int:
    """**Local.** Upload the committed step in `directory`; the bytes sent.

    Raises NoCheckpoint, MissingShard, CorruptShard, InvalidManifest, RemoteFailed.
    """
    with reading(directory):
        manifest = read_manifest(directory)
        place, sent = remote_step(store, manifest), 0
        for shard in manifest.shards:
            sent += send_shard(store, place / shard.path, directory / shard.path, shard, advance)
    remote_tier.check_complete(store, manifest)
    write_upload_manifest(store, manifest)
    return sent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    remote.add_remote(parser)
    text.add_step(parser)
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Push; the exit status."""
    directory = find_committed(checkpoints_root(arguments.run_dir), arguments.step)
    store = remote.opened(arguments.remote)
    with progress("push", size_of_files(directory)) as advance:
        sent = push(directory, store, advance)
    step = read_manifest(directory).step
    if arguments.json:
        text.print_json({"step": step, "remote": store.url, "sent_nbytes": sent})
    else:
        print(f"step {step} is in {store.url}; {text.size(sent)} sent")
    return status.WELL
