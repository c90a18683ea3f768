"""What the directories of several nodes, all seen from here, hold of a step, and what can be made of it. No MPI."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpi_ckpt.checkpoint.local_holdings import Copy
from mpi_ckpt.comm.combination import Combination, Part
from mpi_ckpt.comm.exchange import exchange
from mpi_ckpt.errors import CheckpointError, InvalidManifest, NoCheckpoint
from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.descriptor import ParityPiece
from mpi_ckpt.redundancy.files import Files
from mpi_ckpt.redundancy.planner import DATA
from mpi_ckpt.redundancy.rebuild import verify_parity, verify_rebuilt
from mpi_ckpt.redundancy.recovery import FileKey, Place, Recovery, Vote, plan_recovery
from mpi_ckpt.redundancy.survey import Found, survey
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.tools.locate import are_of_node, checkpoints_root, naming_runs, nodes_of

logger = logging.getLogger(__name__)

DIRECTORIES = "the run's directory on each node, such as /mnt/node*/ckpt/demo; {domain} in it stands for every name"


def add_local(parser: argparse._ActionsContainer) -> None:
    """The option --local."""
    parser.add_argument("--local", metavar="DIR", type=Path, nargs="+", help=DIRECTORIES)


def named(arguments: argparse.Namespace) -> list[Path]:
    """**Local.** The nodes' directories: those of --local, or what RUN_DIR turns out to be; [] for any other."""
    if arguments.local:
        return nodes_of(arguments.local, arguments.run_dir)
    return nodes_in_place_of(arguments.run_dir)


def heading(arguments: argparse.Namespace) -> str:
    """Which place is read where --local is given; RUN_DIR beside it may be taken for that."""
    directories = named(arguments)
    more = f", ..., {len(directories)} directories" if len(directories) > 4 else ""
    other = "" if arguments.run_dir is None else f" (not in {arguments.run_dir})"
    return f"on the nodes {', '.join(map(str, directories[:4]))}{more}{other}:"


def nodes_in_place_of(run_dir: Path) -> list[Path]:
    """**Local.** The nodes' directories that were named in the place of a run's; [] where it is none of a node's."""
    places = nodes_of([run_dir])
    if places != [run_dir]:
        return places
    root = checkpoints_root(run_dir)
    return [root] if are_of_node(root) else []


class Plan(NamedTuple):
    """What has to be done for a save, and where each file lies that it takes.

    The groups of `recovery` are those that are protected: ranks that have lost all redundancy are `bare` in its report.
    """

    recovery: Recovery
    sources: dict[FileKey, Path]


@dataclass(frozen=True)
class Sight:
    """A save of a step as all nodes together hold it: its manifest, and each intact shard by name.

    `found[i]` is what lies in the i-th node's directory of the step.
    """

    manifest: ShardManifest
    directories: list[Path]
    found: list[Found]
    shards: dict[str, Path]

    def plan(self, homes: Sequence[Path] = ()) -> Plan:
        """What has to be made again, redundancy too where any is left. Raises LostBeyondScheme.

        `homes`: the directory where the files of each rank belong; what lies elsewhere alone is to be copied there.
        """
        untold = dict(zip(self.directories, self.found, strict=True))
        readers = [*homes, *self.directories]  # as if a rank ran in each of them
        votes = [Vote(Place("", str(place)), untold.pop(place, Found())) for place in readers]
        plan = plan_recovery(votes, self.manifest.save_id, self.manifest.shards)
        parts = (part for combination in plan.combinations for part in combination.sources)
        sources = {part.file: readers[part.rank] / plan.names[part.file] for part in parts}
        return Plan(replace(plan, groups=plan.groups[: len(plan.groups) - len(plan.report.bare)]), sources)


def committed_steps(nodes: Sequence[Path]) -> dict[int, list[ShardManifest]]:
    """**Local.** The steps that any node has a valid manifest of, ascending; the saves of each, the latest first."""
    found = {step: manifests(nodes, step) for step in listed_steps(nodes)}
    for _, faults in found.values():
        for fault in faults:
            logger.warning("a node's copy of a manifest counts for nothing: %s", fault)
    return {step: by_age(valid) for step, (valid, _) in found.items() if valid}


def all_steps(nodes: Sequence[Path]) -> list[int]:
    """**Local.** The steps that any node has a directory of, ascending."""
    return sorted({step for node in nodes for step in (*names.list_steps(node), *names.list_uncommitted(node))})


def listed_steps(nodes: Sequence[Path]) -> list[int]:
    """**Local.** The steps that any node has a manifest of, ascending."""
    return sorted({step for node in nodes for step in names.list_steps(node)})


def find_listed(nodes: Sequence[Path], step: int | None) -> list[int]:
    """**Local.** Those steps, or `step` alone. Raises NoCheckpoint where it is not among them, or none is."""
    listed = listed_steps(nodes)
    if not listed or step not in (None, *listed):
        raise no_step(nodes, step, listed)
    return listed if step is None else [step]


def manifests(nodes: Sequence[Path], step: int) -> tuple[list[ShardManifest], list[CheckpointError]]:
    """**Local.** The nodes' valid copies of a step's manifest, and what is wrong with the others."""
    valid: list[ShardManifest] = []
    faults: list[CheckpointError] = []
    for node in nodes:
        try:
            valid.append(read_manifest(names.step_dir(node, step)))
        except NoCheckpoint:
            continue
        except InvalidManifest as fault:
            faults.append(fault)
    return valid, faults


def by_age(copies: Iterable[ShardManifest]) -> list[ShardManifest]:
    """A manifest of each save among `copies`, the latest first."""
    saves = {manifest.save_id: manifest for manifest in copies}.values()
    return sorted(saves, key=lambda m: Copy(m.save_count, m.created, m.save_id), reverse=True)


def no_step(nodes: Sequence[Path], step: int | None, committed: Iterable[int]) -> NoCheckpoint:
    """The error for a step, or any, that no node has a manifest of."""
    listed = ", ".join(map(str, committed))
    error = NoCheckpoint(
        "the nodes hold no committed step" if step is None else f"the nodes do not hold step {step}",
        path=", ".join(map(str, nodes)),
        found=f"steps {listed}" if listed else "no manifest",
        expected="a step with a manifest in at least one of the directories",
        action="Name the run's own directory of each node that can still be seen: --local of its training command, and "
        "the name of its run directory.",
    )
    return error if listed else naming_runs(error, nodes)


def look(nodes: Sequence[Path], manifest: ShardManifest) -> Sight:
    """**Local.** Read all that the nodes have of the step, and remember what is intact."""
    directories = [names.step_dir(node, manifest.step) for node in nodes]
    found = [survey(d, manifest.save_id, manifest.shards, verify=range(manifest.world_size)) for d in directories]
    right = {record.path: record.nbytes for record in manifest.shards}
    shards: dict[str, Path] = {}
    for directory, here in zip(directories, found, strict=True):
        for name in here.files.keys() - here.damaged:
            if here.files[name] == right.get(name):
                shards.setdefault(name, directory / name)
    return Sight(manifest, directories, found, shards)


def best(nodes: Sequence[Path], saves: Sequence[ShardManifest]) -> tuple[Sight, Plan]:
    """**Local.** Of several saves of a step, in this order, the first that the nodes can give back, and how.

    A node that was away for a while brings one along that the others have replaced since, or never had. Raises
    LostBeyondScheme, of the first one, where none can be had.
    """
    lost: list[LostBeyondScheme] = []
    for manifest in saves:
        sight = look(nodes, manifest)
        try:
            return sight, sight.plan()
        except LostBeyondScheme as error:
            lost.append(error)
            if len(saves) > 1:
                logger.warning("step %d: of save %s too little is left: %s", manifest.step, manifest.save_id, error)
    raise lost[0]


def choose(nodes: Sequence[Path], copies: Sequence[ShardManifest]) -> ShardManifest:
    """**Local.** The manifest that counts among the nodes' valid ones of a step: that of the save which `best` takes,
    else of the latest. Reads what lies there only where the copies are of several saves."""
    saves = by_age(copies)
    with contextlib.suppress(LostBeyondScheme):
        return saves[0] if len(saves) == 1 else best(nodes, saves)[0].manifest
    return saves[0]


def make_again(
    plan: Plan, targets: dict[FileKey, Path], advance: Callable[[int], None]
) -> dict[FileKey, tuple[ParityPiece, ...]]:
    """**Local.** Write the files `targets`, temporary names, from those that are there, durably.

    Data are read back and compared with what was saved, parity that was copied with what is known of it: raises
    CorruptShard, OSError.
    """
    if not targets:
        return {}
    recovery = plan.recovery
    with Files(plan.sources, targets) as files:
        port = files.port()

        def write(part: Part, lo: int, buffer: np.ndarray, n: int) -> Future[None]:
            advance(n)
            return port.write(part, lo, buffer, n)

        wanted = [_here(combination, targets) for combination in recovery.combinations]
        exchange(None, wanted, replace(port, write=write), timeout=math.inf)
        pieces = files.finish({key: recovery.nbytes(key) for key in targets})
    for key, path in targets.items():
        member = recovery.groups[key.group].members[key.member]
        if key.kind == DATA:
            verify_rebuilt(path, member)
        else:
            verify_parity(path, member, pieces[key], recovery.parity.get(key, pieces[key]))
    return pieces


def _here(combination: Combination, wanted: Iterable[FileKey]) -> Combination:
    """The part of a combination that makes files which are wanted, for one process that reads and writes them all."""
    chosen = [i for i, part in enumerate(combination.targets) if part.file in wanted]
    return Combination(
        tuple(replace(part, rank=0) for part in combination.sources),
        tuple(replace(combination.targets[i], rank=0) for i in chosen),
        tuple(combination.factors[i] for i in chosen),
    )
