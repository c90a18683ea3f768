"""`scavenge`: after a dead job, bring what its nodes still hold into the shared directory."""

from __future__ import annotations

import argparse
import logging
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
from mpi_ckpt.tools.locate import nodes_of
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import committing, is_there, writing

logger = logging.getLogger(__name__)

HELP = "bring what the nodes of a dead job hold into the shared directory"
DESCRIPTION = """Copy the newest step that the node-local directories --local still give back (or --step) into the
checkpoints of RUN_DIR, made if need be: shards that lie there are copied, lost or damaged ones made again by the
redundancy of the others, each compared with its sha256, and the manifest last. A step of which more is lost than its
scheme covers is named, and the next older one taken. The nodes' directories are only read. The writer's lock of RUN_DIR
is held meanwhile: beside a running job, scavenge refuses.

A run of the trainer has left its run.json on the nodes: the step goes into RUN_DIR/checkpoints then, and run.json comes
along if it is not in RUN_DIR, so that the trainer goes on from there. From any other program the step goes into RUN_DIR
itself, unless that has a directory `checkpoints`.

DIR may be what the trainer has as --local, without the name of the run, if RUN_DIR has that name."""
EXAMPLE = "python -m mpi_ckpt scavenge --local /mnt/node*/ckpt/demo --out runs/demo"
_OTHER = "the nodes hold another run's steps"


@dataclass(frozen=True)
class Salvaged:
    """What was done: `copied` and `rebuilt` are file names, none where the step was there; `lost` are newer steps."""

    step: int
    directory: Path
    copied: tuple[str, ...]
    rebuilt: tuple[str, ...]
    lost: dict[int, str]


def scavenge(local: Sequence[Path], root: Path, step: int | None = None, advance: Advance = lambda _: None) -> Salvaged:
    """**Local.** Commit below `root` the newest step that the nodes' directories give back, or `step`.

    Raises NoCheckpoint, LostBeyondScheme when no step can be had, StepExists, DirectoryInUse, CorruptShard, SaveFailed
    for want of room, OSError; no file of the step is left then.
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
        copied, rebuilt = _commit(sight, plan, root, advance)
        said = {newer: str(error) for newer, error in lost.items()}
        return Salvaged(found, names.step_dir(root, found), copied, rebuilt, said)
    raise _nothing_left(lost)


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
        if is_there(directory, manifest):
            return (), ()
        present = [shard for shard in manifest.shards if shard.path in sight.shards]
        data = {key: name for key, name in plan.recovery.names.items() if key.kind == DATA}
        missing = {key: name for key, name in data.items() if name not in sight.shards}
        with committing(root, launch_id, manifest.step, sum(shard.nbytes for shard in manifest.shards)) as draft:
            for shard in present:
                fetch_shard(sight.shards[shard.path], shard, draft.temporary(shard.path), advance)
            targets = {key: draft.temporary(name) for key, name in missing.items()}
            nodes.make_again(plan, targets, advance)
            draft.commit(manifest)
    return tuple(shard.path for shard in present), tuple(missing.values())


def find_run_file(local: Sequence[Path]) -> tuple[Path, bytes] | None:
    """**Local.** The trainer's `run.json` as the node has it whose steps are the newest. None where no node has any.

    Raises UnusableOption where those of the nodes speak of different runs.
    """
    newest_first = sorted(local, key=lambda node: max(names.list_steps(node), default=-1), reverse=True)
    paths = [path for node in newest_first if (path := node / RUN_FILE).is_file()]
    copies: list[tuple[Path, bytes]] = []
    for path, data in ((path, path.read_bytes()) for path in paths):
        if same_run(data, data):
            copies.append((path, data))
        else:
            logger.warning("cannot be read, counts for nothing: %s", path)
    for path, data in copies[1:]:
        if not same_run(data, copies[0][1]):
            raise homecoming.other_run(_OTHER, path, copies[0][0])
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
    source, run_file = find_run_file(local) or (None, None)
    homecoming.check_same_run(out, run_file, source, _OTHER)
    newest = nodes.committed_steps(local)
    total = sum(shard.nbytes for shard in newest[max(newest)][0].shards) if newest else 0
    with progress("scavenge", total) as advance:
        done = scavenge(local, homecoming.root_for(out, run_file), arguments.step, advance)
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
