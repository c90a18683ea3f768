"""`pull`: bring a step from a remote tier into a run's directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import remote_step
from mpi_ckpt.storage.shard_stream import fetch_shard
from mpi_ckpt.tools import remote, status, text
from mpi_ckpt.tools.locate import new_root
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import committing, is_there, writing

HELP = "download a step from a remote tier"
DESCRIPTION = """Download the newest step of --remote (or --step) into RUN_DIR, made if need be: every shard, durable
and compared with its sha256, and the manifest last. A step that is in RUN_DIR already, from the same save, is left as
it is; from another save, it is an error. The writer's lock is held meanwhile: beside a running job, pull refuses. A
restore needs no pull: it reads from the remote tier by itself."""
EXAMPLE = "python -m mpi_ckpt pull runs/demo --remote s3://bucket/demo --step 20"


def pull(store: ObjectStore, step: int, root: Path, advance: Advance = lambda nbytes: None) -> ShardManifest | None:
    """**Local.** Commit `step` of the store below the checkpoints root `root`; None if that very save is there already.

    Raises NoCheckpoint, StepExists, DirectoryInUse, MissingShard, CorruptShard, InvalidManifest, RemoteFailed,
    SaveFailed for want of room, OSError; no file of the step is left then.
    """
    manifest = remote.manifest_of(store, step)
    directory, place = names.step_dir(root, step), remote_step(store, manifest)
    atomic.make_dir(root)
    with writing(root) as launch_id:
        if is_there(directory, manifest):
            return None
        with committing(root, launch_id, manifest):
            for shard in manifest.shards:
                fetch_shard(place / shard.path, shard, directory / shard.path, advance)
    return manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory, or that of its checkpoints")
    remote.add_remote(parser)
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="a remote step (default: the newest)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Pull; the exit status."""
    store = remote.opened(arguments.remote)
    step = remote.find_remote(store, arguments.step)[-1]
    root = new_root(arguments.run_dir)
    total = sum(shard.nbytes for shard in remote.manifest_of(store, step).shards)
    with progress("pull", total) as advance:
        pulled = pull(store, step, root, advance)
    directory = names.step_dir(root, step)
    if arguments.json:
        text.print_json({"step": step, "directory": str(directory), "fetched_nbytes": total if pulled else 0})
    else:
        print(f"step {step} is in {directory}; {text.size(total) if pulled else 'nothing'} fetched")
    return status.WELL
