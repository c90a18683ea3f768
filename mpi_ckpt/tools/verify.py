"""`verify`: read committed steps and compare every file with its manifest."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mpi_ckpt.checkpoint import steps as step_directories
from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.errors import CheckpointError, InvalidManifest, UnknownSchema
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.places import Directory, RemoteStep
from mpi_ckpt.storage.remote_steps import find_remote, is_uploaded, list_remote, read_upload_manifest, remote_step
from mpi_ckpt.storage.shard_file import ShardRecord, verify_file
from mpi_ckpt.tools import nodes, remote, status, text
from mpi_ckpt.tools.locate import checkpoints_root, quoted, run_of, save_id_of, size_of_files
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.verdict import Verdict, fault_of, without_action
from mpi_ckpt.tools.verify_nodes import verify_nodes

HELP = "read every committed step and compare it with its manifest"
DESCRIPTION = """Read every committed step (or --step) and compare it with its manifest: the manifest's own digest
and structure, and of each shard presence, size, sha256 and crc32c. With --quick the crc32c alone, which reads as
much and computes less: it finds damage, not forgery. Nothing is changed. A step that is pruned meanwhile is no
damage. With --remote, the steps of a remote tier: every byte is read from there.

Of nodes' own directories (--local, or one in the place of RUN_DIR) everything that lies there: shards, parity files
and redundancy descriptors. What does not lie there is on other nodes, and no damage. Beside RUN_DIR, which is
not read then, --local may be what the trainer has, without the name of the run."""
EXAMPLE = """python -m mpi_ckpt verify runs/demo --quick
  python -m mpi_ckpt verify --local /mnt/node*/ckpt/demo"""


def verify(
    root: Path, *, quick: bool = False, steps: Sequence[int] | None = None, advance: Advance = lambda nbytes: None
) -> Iterator[Verdict]:
    """**Local.** A verdict for each of `steps` (None: every committed step) below `root`; files are read in parallel.

    Compares sizes, sha256 and crc32c; with `quick` the crc32c alone. `advance` is told of every file's bytes. A step
    that is pruned while it is read has no verdict.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as readers:  # hashing releases the GIL
        for step in names.list_steps(root) if steps is None else steps:
            directory = names.step_dir(root, step)
            verdict = _verify_step(directory, step, quick, readers, advance)
            if verdict.intact or step_directories.is_committed(directory):
                yield verdict


def verify_remote(
    store: ObjectStore, steps: Sequence[int], *, quick: bool = False, advance: Advance = lambda nbytes: None
) -> Iterator[Verdict]:
    """**Local.** The same for `steps` of a remote tier. Raises RemoteFailed when it does not answer."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as readers:
        for step in steps:
            try:
                manifest = read_upload_manifest(store, step)
            except InvalidManifest as fault:
                yield Verdict(step, RemoteStep(store.url, step, ""), 0, [fault])
                continue
            if manifest is not None:
                place = remote_step(store, manifest)
                faults = [f for f in readers.map(partial(_fault_of, place, quick, advance), manifest.shards) if f]
                for found in faults:
                    again = f"python -m mpi_ckpt push RUN_DIR --remote {store.url} --step {step} --again"
                    found.action = f"Send it again from where it is intact: `{again}`."
                if not faults or is_uploaded(store, manifest):  # else it was retired or replaced meanwhile
                    yield Verdict(step, place, sum(shard.nbytes for shard in manifest.shards), faults)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    remote.add_place(parser)
    parser.add_argument("--quick", action="store_true", help="compare crc32c instead of sha256")
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="this step alone (default: all)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print a verdict a step; the exit status."""
    remote.check_place(arguments)
    if arguments.local and not arguments.json:
        print(nodes.heading(arguments))
    verdicts = []
    for verdict in _remotely(arguments) if arguments.remote is not None else _locally(arguments):
        verdicts.append(verdict)
        if not arguments.json:
            verdict.print()
    if arguments.json:
        text.print_json([verdict.as_json() for verdict in verdicts])
    if not verdicts:  # all of them were pruned meanwhile
        return status.NOTHING_THERE
    return status.WELL if all(verdict.intact for verdict in verdicts) else status.NOT_WELL


def _locally(arguments: argparse.Namespace) -> Iterator[Verdict]:
    local = nodes.named(arguments)
    if local:
        steps = nodes.find_listed(local, arguments.step)
        total = sum(size_of_files(names.step_dir(node, step)) for node in local for step in steps)
        with progress("verify", total) as advance:
            yield from verify_nodes(local, steps, quick=arguments.quick, advance=advance)
        return
    root = checkpoints_root(arguments.run_dir)
    find_committed(root, arguments.step)  # raises NoCheckpoint where there is nothing to verify
    steps = names.list_steps(root) if arguments.step is None else [arguments.step]
    with progress("verify", sum(size_of_files(names.step_dir(root, step)) for step in steps)) as advance:
        yield from verify(root, quick=arguments.quick, steps=steps, advance=advance)


def _remotely(arguments: argparse.Namespace) -> Iterator[Verdict]:
    store = remote.opened(arguments.remote)
    steps = find_remote(store, arguments.step)
    listed = list_remote(store)
    with progress("verify", sum(sum(listed[step].shards.values()) for step in steps if step in listed)) as advance:
        yield from verify_remote(store, steps, quick=arguments.quick, advance=advance)


def _verify_step(directory: Path, step: int, quick: bool, readers: ThreadPoolExecutor, advance: Advance) -> Verdict:
    while True:
        try:
            manifest = read_manifest(directory)
        except UnknownSchema as fault:  # nothing to be brought back: another version can read it
            return Verdict(step, directory, 0, [fault])
        except CheckpointError as fault:
            return Verdict(step, directory, 0, without_action([fault]), advice=_advice(directory, step))
        found = readers.map(partial(_fault_of, directory, quick, advance), manifest.shards)
        faults = [fault for fault in found if fault is not None]
        if not faults or save_id_of(directory) in (manifest.save_id, None):
            nbytes = sum(shard.nbytes for shard in manifest.shards)
            return Verdict(step, directory, nbytes, without_action(faults), advice=_advice(directory, step))
        # The step was saved again meanwhile: what is missing of the older save is no damage.


def _advice(directory: Path, step: int) -> str:
    run = quoted(run_of(directory.parent))
    return (
        f"`python -m mpi_ckpt pull {run} --remote URL --step {step}` brings it back from a remote tier that has it, "
        f"`python -m mpi_ckpt scavenge --local DIR ... --out {run} --step {step}` from the nodes; else a launch goes "
        "on from an older step with --on-damage older"
    )


def _fault_of(directory: Directory, quick: bool, advance: Advance, record: ShardRecord) -> CheckpointError | None:
    """What is wrong with one shard, if anything."""
    path = directory / record.path
    try:
        return fault_of(lambda: verify_file(path, record, "quick" if quick else "full"), path, record.rank)
    finally:
        advance(record.nbytes)
