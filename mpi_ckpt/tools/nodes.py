"""What the directories of several nodes, all seen from here, hold of a step, and what can be made of it. No MPI."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mpi_ckpt.checkpoint.local_tier import Copy, Holdings, agreed
from mpi_ckpt.comm.exchange import Combination
from mpi_ckpt.errors import CorruptShard, InvalidManifest, NoCheckpoint
from mpi_ckpt.redundancy.descriptor import ParityPiece
from mpi_ckpt.redundancy.files import Files
from mpi_ckpt.redundancy.planner import DATA
from mpi_ckpt.redundancy.recovery import FileKey, Place, Recovery, Vote, plan_recovery
from mpi_ckpt.redundancy.survey import Found, survey
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.shard_check import hash_file

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20  # bytes of each file at a time


@dataclass
class Sight:
    """A step as all `nodes` together hold it: its latest manifest, each intact file by name, and the plan of repair.

    `found[i]` is what lies in the i-th node's directory of the step.
    """

    manifest: ShardManifest
    directories: list[Path]
    found: list[Found]
    where: dict[str, Path] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every shard lies somewhere, with or without redundancy."""
        return all(record.path in self.where for record in self.manifest.shards)

    def plan(self) -> Recovery:
        """What has to be made again, redundancy too unless there is none at all. Raises LostBeyondScheme."""
        if self.is_whole and not any(found.descriptors for found in self.found):
            return Recovery([])
        descriptors = {(d.group, d.member): d for found in self.found for d in found.descriptors}
        files = {name: path.stat().st_size for name, path in self.where.items()}
        return plan_recovery([Vote(Place("", ""), Found(tuple(descriptors.values()), files))], self.manifest.save_id)


def committed_steps(nodes: Sequence[Path]) -> dict[int, ShardManifest]:
    """**Local.** The steps that any node has a valid manifest of, ascending, by that of the latest save."""
    seen: list[dict[int, ShardManifest]] = []
    for node in nodes:
        seen.append({})
        for step in names.list_steps(node):
            try:
                seen[-1][step] = read_manifest(names.step_dir(node, step))
            except (InvalidManifest, NoCheckpoint) as error:
                logger.warning("a node's copy of a manifest counts for nothing: %s", error)
    holdings = [
        Holdings({step: Copy(m.save_count, m.created, m.save_id) for step, m in each.items()}, frozenset())
        for each in seen
    ]
    return {step: seen[index][step] for step, (_, index) in sorted(agreed([*holdings]).latest.items())}


def look(nodes: Sequence[Path], manifest: ShardManifest) -> Sight:
    """**Local.** Read all that the nodes have of the step, and remember what is intact."""
    directories = [names.step_dir(node, manifest.step) for node in nodes]
    found = [survey(directory, manifest.save_id, verify=range(manifest.world_size)) for directory in directories]
    sight = Sight(manifest, directories, found)
    right = {record.path: record.nbytes for record in manifest.shards}
    for directory, here in zip(directories, found, strict=True):
        for name, nbytes in here.files.items():
            if name not in here.damaged and right.get(name, nbytes) == nbytes:
                sight.where.setdefault(name, directory / name)
    return sight


def make_again(
    sight: Sight, plan: Recovery, targets: dict[FileKey, Path], advance: Callable[[int], None]
) -> dict[FileKey, tuple[ParityPiece, ...]]:
    """**Local.** Write the files `targets` from those that are there, durably, under their temporary names.

    Data are read back and compared with what was saved: raises CorruptShard, OSError.
    """
    if not targets:
        return {}
    sources = {key: sight.where[name] for key, name in plan.names.items() if name in sight.where}
    temporary = {key: names.tmp(path) for key, path in targets.items()}
    with Files(sources, temporary) as files:
        for combination in plan.combinations:
            _carry_out(_only(combination, targets), files, advance)
        pieces = files.finish({key: plan.nbytes(key) for key in targets})
    for key, path in temporary.items():
        if key.kind == DATA:
            _verify(path, plan.groups[key.group].members[key.member].sha256)
    return pieces


def _only(combination: Combination, wanted: Iterable[FileKey]) -> Combination:
    """The part of a combination that makes files which are wanted."""
    chosen = [i for i, part in enumerate(combination.targets) if part.file in wanted]
    targets = tuple(combination.targets[i] for i in chosen)
    return replace(combination, targets=targets, factors=tuple(combination.factors[i] for i in chosen))


def _carry_out(combination: Combination, files: Files, advance: Callable[[int], None]) -> None:
    """`comm.exchange` within one process: all parts are here."""
    port = files.port()
    buffers = [np.frombuffer(mmap.mmap(-1, _CHUNK), np.uint8) for _ in range(len(combination.sources) + 1)]
    *inputs, out = buffers
    for lo in range(0, combination.nbytes, _CHUNK):
        lengths = [min(max(part.nbytes - lo, 0), _CHUNK) for part in combination.sources]
        reads = [
            port.read(part, lo, buffer, n)
            for part, buffer, n in zip(combination.sources, inputs, lengths, strict=True)
            if n
        ]
        for read in reads:
            read.result()
        for part, row in zip(combination.targets, combination.factors, strict=True):
            n = min(max(part.nbytes - lo, 0), _CHUNK)
            if n:
                data = [buffer[: min(length, n)] for buffer, length in zip(inputs, lengths, strict=True)]
                port.combine(out[:n], row, data)
                port.write(part, lo, out, n).result()
                advance(n)


def _verify(path: Path, sha256: str) -> None:
    found = hash_file(path)[0]
    if found != sha256:
        raise CorruptShard(
            "a file that redundancy gave back is not what was saved",
            path=names.published(path),
            found=f"sha256 {found}",
            expected=f"sha256 {sha256}",
            action="A file that it was made from changed meanwhile: see what writes there, and try again.",
        )
