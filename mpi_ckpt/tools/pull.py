"""`pull`: bring a step from a remote tier into a run's directory."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import find_remote, remote_manifest, remote_step
from mpi_ckpt.storage.run_file import RUN_FILE
from mpi_ckpt.storage.shard_stream import fetch_shard
from mpi_ckpt.tools import homecoming, remote, status, text
from mpi_ckpt.tools.homecoming import RunFile
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import committing, shards_wanted, writing

HELP = "download a step from a remote tier"
DESCRIPTION = """Download the newest step of --remote (or --step) into RUN_DIR, made if need be: every shard, durable
and compared with its sha256, and the manifest last. A step that is in RUN_DIR already, from the same save, is
read, and what is damaged or missing of it fetched; from another save, it is an error. The writer's lock is held
meanwhile: beside a running job, pull refuses. A restore needs no pull: it reads from the remote tier by itself.

A run of the trainer has left its run.json in the remote tier: the step goes into RUN_DIR/checkpoints then, and run.json
comes along if it is not in RUN_DIR, so that the trainer goes on from there. From any other program the step goes into
RUN_DIR itself, unless that has a directory `checkpoints`."""
EXAMPLE = "python -m mpi_ckpt pull runs/demo --remote s3://bucket/demo --step 20"


def pull(
    store: ObjectStore, step: int, root: Path, run_file: RunFile | None, advance: Advance = lambda nbytes: None
) -> int:
    """**Local.** Commit `step` of the store below the checkpoints root `root`, or mend that very save there; the bytes
    fetched, 0 where all of it is there.

    `run_file` is the store's. Raises NoCheckpoint, UnusableOption where the step is another run's, StepExists,
    DirectoryInUse, MissingShard, CorruptShard, InvalidManifest, RemoteFailed, SaveFailed for want of room, OSError; no
    file that was not there is left then.
    """
    manifest = remote_manifest(store, step)
    directory, place = names.step_dir(root, step), remote_step(store, manifest)
    homecoming.check_arrival(manifest, f"{store.url}/{names.step_name(step)}", root, run_file)
    atomic.make_dir(root)
    with writing(root) as launch_id:
        wanted = shards_wanted(directory, manifest, advance)
        nbytes = sum(shard.nbytes for shard in wanted)
        if not wanted:
            return 0
        with committing(root, launch_id, step, nbytes) as draft:
            for shard in wanted:
                fetch_shard(place / shard.path, shard, draft.temporary(shard.path), advance)
            draft.commit(manifest)
    return nbytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    remote.add_remote(parser)
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="a remote step (default: the newest)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Pull; the exit status."""
    store = remote.opened(arguments.remote)
    step = find_remote(store, arguments.step)[-1]
    run_file = remote.run_file(store)
    root = homecoming.root_for(arguments.run_dir, run_file)
    homecoming.check_same_run(root, run_file, remote.OTHER_RUN)
    total = sum(shard.nbytes for shard in remote_manifest(store, step).shards)
    with progress("pull", total) as advance:
        nbytes = pull(store, step, root, run_file, advance)
    fetched = homecoming.bring_run_file(arguments.run_dir, run_file) is not None
    directory = names.step_dir(root, step)
    if arguments.json:
        text.print_json({"step": step, "directory": str(directory), "fetched_nbytes": nbytes})
    else:
        what = text.size(nbytes) if nbytes else "nothing"
        print(f"step {step} is in {directory}; {what}{f' and {RUN_FILE}' * fetched} fetched")
    return status.WELL
