"""`scavenge`: after a dead job, bring what its nodes still hold into the shared directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.planner import DATA
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.run_file import RUN_FILE, same_run
from mpi_ckpt.storage.shard_stream import fetch_shard
from mpi_ckpt.tools import homecoming, nodes, status, text
from mpi_ckpt.tools.homecoming import RunFile
from mpi_ckpt.tools.locate import nodes_of, save_id_of
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import committing, shards_wanted, writing

HELP = "bring what the nodes of a dead job hold into the shared directory"
DESCRIPTION = """Copy the newest step that the node-local directories --local still give back (or --step) into the
checkpoints of RUN_DIR, made if need be: shards that lie there are copied, lost or damaged ones made again by the
redundancy of the others, each compared with its sha256, and the manifest last. A step of which more is lost than its
scheme covers is named, and the next older one taken. Where that save is in RUN_DIR already, it is read, and what is
damaged or missing of it brought there. The nodes' directories are only read. The writer's lock of RUN_DIR is held
meanwhile: beside a running job, scavenge refuses.

A run of the trainer has left its run.json on the nodes: the step goes into RUN_DIR/checkpoints then, and run.json comes
along if it is not in RUN_DIR, so that the trainer goes on from there. From any other program the step goes into RUN_DIR
itself, unless that has a directory `checkpoints`.

DIR may be what the trainer has as --local, without the name of the run, if RUN_DIR has that name."""
EXAMPLE = "python -m mpi_ckpt scavenge --local /mnt/node*/ckpt/demo --out runs/demo"
_OTHER = "the nodes hold another run's steps"


@dataclass(frozen=True)
class Salvaged:
    """What was done: `copied` and `rebuilt` are file names, none where all was there; `lost` are newer steps."""

    step: int
    directory: Path
    copied: tuple[str, ...]
    rebuilt: tuple[str, ...]
    lost: dict[int, str]


def scavenge(
    local: Sequence[Path],
    root: Path,
    run_file: RunFile | None,
    step: int | None = None,
    advance: Advance = lambda _: None,
) -> Salvaged:
    """**Local.** Commit below `root` the newest step that the nodes' directories give back, or `step`.

    `run_file` is the nodes'. Raises NoCheckpoint, LostBeyondScheme when no step can be had, UnusableOption where it is
    another run's, StepExists, DirectoryInUse, CorruptShard, SaveFailed for want of room, OSError; no file that was
    not there is left then.
    """
    committed = nodes.committed_steps(local)
    wanted = [found for found in reversed(committed) if step in (None, found)]
    if not wanted:
        raise nodes.no_step(local, step, committed)
    lost: dict[int, LostBeyondScheme] = {}
    for found in wanted:
        try:
            sight, plan = nodes.best(local, committed[found])
        except LostBeyondScheme as error:
            error.action = "Name the directories of more nodes, if there are any; else this step is lost."
            lost[found] = error
            continue
        homecoming.check_arrival(sight.manifest, _holder(sight), root, run_file)
        copied, rebuilt = _commit(sight, plan, root, advance)
        said = {newer: str(error) for newer, error in lost.items()}
        return Salvaged(found, names.step_dir(root, found), copied, rebuilt, said)
    raise _nothing_left(lost)


def _holder(sight: nodes.Sight) -> Path:
    """A node's directory of the step, with the manifest that counts."""
    return next(d for d in sight.directories if save_id_of(d) == sight.manifest.save_id)


def _nothing_left(lost: dict[int, LostBeyondScheme]) -> LostBeyondScheme:
    """What is lost of the newest step, the one that would have been worth most."""
    newest, listed = max(lost), ", ".join(map(str, sorted(lost)))
    error = lost[newest]
    error.what = f"step{'s' * (len(lost) > 1)} {listed} cannot be had from the nodes; of step {newest}: {error.what}"
    error.action = "Name the directories of more nodes; else go on from the shared or the remote tier."
    return error


def _commit(
    sight: nodes.Sight, plan: nodes.Plan, root: Path, advance: Advance
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    manifest = sight.manifest
    directory = names.step_dir(root, manifest.step)
    atomic.make_dir(root)
    with writing(root) as launch_id:
        wanted = shards_wanted(directory, manifest, advance)
        if not wanted:
            return (), ()
        present = [shard for shard in wanted if shard.path in sight.shards]
        others = {shard.path for shard in wanted if shard.path not in sight.shards}
        data = {key: name for key, name in plan.recovery.names.items() if key.kind == DATA}
        missing = {key: name for key, name in data.items() if name in others}
        with committing(root, launch_id, manifest.step, sum(shard.nbytes for shard in wanted)) as draft:
            for shard in present:
                fetch_shard(sight.shards[shard.path], shard, draft.temporary(shard.path), advance)
            targets = {key: draft.temporary(name) for key, name in missing.items()}
            nodes.make_again(plan, targets, advance)
            draft.commit(manifest)
    return tuple(shard.path for shard in present), tuple(missing.values())


def find_run_file(local: Sequence[Path]) -> RunFile | None:
    """**Local.** The trainer's `run.json` as the node has it whose steps are the newest. None where no node has any.

    Raises UnusableOption where those of the nodes speak of different runs.
    """
    newest_first = sorted(local, key=lambda node: max(names.list_steps(node), default=-1), reverse=True)
    paths = [path for node in newest_first if (path := node / RUN_FILE).is_file()]
    copies = [copy for path in paths if (copy := homecoming.readable(path, path.read_bytes()))]
    for copy in copies[1:]:
        if not same_run(copy.data, copies[0].data):
            raise homecoming.other_run(_OTHER, copy, copies[0])
    return copies[0] if copies else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("--local", metavar="DIR", type=Path, nargs="+", required=True, help=nodes.DIRECTORIES)
    parser.add_argument("--out", metavar="RUN_DIR", type=Path, required=True, help="a run, or its checkpoints")
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="a step (default: the newest that is whole)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Scavenge; the exit status."""
    out, local = arguments.out, nodes_of(arguments.local, arguments.out)
    run_file = find_run_file(local)
    root = homecoming.root_for(out, run_file)
    homecoming.check_same_run(root, run_file, _OTHER)
    newest = nodes.committed_steps(local)
    total = sum(shard.nbytes for shard in newest[max(newest)][0].shards) if newest else 0
    with progress("scavenge", total) as advance:
        done = scavenge(local, root, run_file, arguments.step, advance)
    brought = homecoming.bring_run_file(out, run_file)
    if arguments.json:
        found: dict[str, Any] = {"step": done.step, "directory": str(done.directory)}
        found |= {"copied": done.copied, "rebuilt": done.rebuilt, "lost": done.lost}
        text.print_json(found | {"run_file": None if brought is None else str(brought)})
        return status.WELL
    for step, error in done.lost.items():
        print(f"step {step} is lost: {error}")
    print(f"step {done.step} is in {done.directory}: {len(done.copied)} shards copied, {len(done.rebuilt)} made again")
    if brought is not None:
        print(f"{RUN_FILE} of the run is in {out}")
    return status.WELL
