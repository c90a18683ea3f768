"""`scavenge`: after a dead job, bring what its nodes still hold into the shared directory."""

from __future__ import annotations

import argparse
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.planner import DATA
from mpi_ckpt.redundancy.recovery import Recovery
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.shard_stream import fetch_shard
from mpi_ckpt.tools import nodes, status, text
from mpi_ckpt.tools.locate import new_root
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import committing, is_there, writing

logger = logging.getLogger(__name__)

HELP = "bring what the nodes of a dead job hold into the shared directory"
DESCRIPTION = """Copy the newest step that the node-local directories --local still give back (or --step) into the
checkpoints of RUN_DIR, made if need be: shards that lie there are copied, lost or damaged ones made again by the
redundancy of the others, each compared with its sha256, and the manifest last. A step of which more is lost than its
scheme covers is named, and the next older one taken. The nodes' directories are only read. The writer's lock of RUN_DIR
is held meanwhile: beside a running job, scavenge refuses."""
EXAMPLE = "python -m mpi_ckpt scavenge --local /mnt/node1/ckpt /mnt/node2/ckpt --out runs/demo"


@dataclass(frozen=True)
class Salvaged:
    """What was done: `copied` and `rebuilt` are file names, none where the step was there; `lost` are newer steps."""

    step: int
    directory: Path
    copied: tuple[str, ...]
    rebuilt: tuple[str, ...]
    lost: dict[int, str]


def scavenge(local: list[Path], root: Path, step: int | None = None, advance: Advance = lambda _: None) -> Salvaged:
    """**Local.** Commit below `root` the newest step that the nodes' directories give back, or `step`.

    Raises NoCheckpoint, LostBeyondScheme when no step can be had, StepExists, DirectoryInUse, CorruptShard, SaveFailed
    for want of room, OSError; no file of the step is left then.
    """
    committed = nodes.committed_steps(local)
    wanted = [found for found in reversed(committed) if step in (None, found)]
    if not wanted:
        raise nodes.no_step(local, step, committed)
    lost: dict[int, str] = {}
    while True:
        found = wanted.pop(0)
        try:
            sight, plan = nodes.best(local, committed[found])
        except LostBeyondScheme as error:
            if not wanted:
                raise
            logger.warning("step %d cannot be had: %s", found, error)
            lost[found] = str(error)
            continue
        copied, rebuilt = _commit(sight, plan, root, advance)
        return Salvaged(found, names.step_dir(root, found), copied, rebuilt, lost)


def _commit(
    sight: nodes.Sight, plan: Recovery, root: Path, advance: Advance
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    manifest = sight.manifest
    directory = names.step_dir(root, manifest.step)
    atomic.make_dir(root)
    with writing(root) as launch_id:
        if is_there(directory, manifest):
            return (), ()
        missing = {key: plan.names[key] for key in plan.targets if key.kind == DATA}
        present = [shard for shard in manifest.shards if shard.path not in missing.values()]
        with committing(root, launch_id, manifest.step, sum(shard.nbytes for shard in manifest.shards)) as draft:
            for shard in present:
                fetch_shard(sight.where[shard.path], shard, draft.temporary(shard.path), advance)
            targets = {key: draft.temporary(name) for key, name in missing.items()}
            nodes.make_again(sight, plan, targets, advance)
            draft.commit(manifest)
    return tuple(shard.path for shard in present), tuple(missing.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("--local", metavar="DIR", type=Path, nargs="+", required=True, help="the nodes' directories")
    parser.add_argument("--out", metavar="RUN_DIR", type=Path, required=True, help="a run, or its checkpoints")
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="a step (default: the newest that is whole)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Scavenge; the exit status."""
    newest = nodes.committed_steps(arguments.local)
    total = sum(shard.nbytes for shard in newest[max(newest)][0].shards) if newest else 0
    with progress("scavenge", total) as advance:
        done = scavenge(arguments.local, new_root(arguments.out), arguments.step, advance)
    if arguments.json:
        found: dict[str, Any] = {"step": done.step, "directory": str(done.directory)}
        text.print_json({**found, "copied": done.copied, "rebuilt": done.rebuilt, "lost": done.lost})
        return status.WELL
    for step, error in done.lost.items():
        print(f"step {step} is lost: {error}")
    print(f"step {done.step} is in {done.directory}: {len(done.copied)} shards copied, {len(done.rebuilt)} made again")
    return status.WELL
