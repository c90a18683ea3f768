"""What the nodes hold: of each step the saves that their manifests speak of, and which of these counts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.errors import InvalidManifest, NoCheckpoint, UnknownSchema
from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.recovery import Vote, plan_recovery
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.records import ShardRecord

logger = logging.getLogger(__name__)


class Copy(NamedTuple):
    """What a node's manifest of a step says of its save; the greatest of several is the latest save."""

    save_count: int
    created: str
    save_id: str


class Holdings(NamedTuple):
    """What a leader finds in its directory: manifests by step, and steps whose directory has none, or a damaged one."""

    committed: dict[int, Copy]
    uncommitted: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()


class Agreed(NamedTuple):
    """What all nodes together hold: of each step its saves, the latest first, each with a rank that has its manifest.

    `unequal` are the steps of which some node has another manifest, a damaged one, or a directory without one;
    `damaged` those of which no node has a manifest that can be read, while some has had one.
    """

    saves: dict[int, list[tuple[Copy, int]]]
    unequal: tuple[int, ...]
    damaged: tuple[int, ...]

    @property
    def latest(self) -> dict[int, tuple[Copy, int]]:
        """The latest save of each step."""
        return {step: saves[0] for step, saves in self.saves.items()}


def holdings_of(root: Path) -> Holdings:
    """**Local.** What lies in a node's directory. Raises UnknownSchema."""
    committed: dict[int, Copy] = {}
    damaged: set[int] = set()
    for step in names.list_steps(root):
        try:
            found = read_manifest(names.step_dir(root, step))
            committed[step] = Copy(found.save_count, found.created, found.save_id)
        except UnknownSchema:
            raise
        except NoCheckpoint:
            continue
        except InvalidManifest as error:
            damaged.add(step)
            logger.warning("a node's copy of a manifest is damaged and counts for nothing: %s", error)
    bare = frozenset(s for s in names.list_uncommitted(root) if not steps.is_set_aside(names.step_dir(root, s)))
    return Holdings(committed, bare, frozenset(damaged))


def is_left(save_id: str, records: Sequence[ShardRecord], votes: Sequence[Vote]) -> bool:
    """Whether what all nodes hold of a save gives back every shard of it."""
    try:
        plan_recovery(votes, save_id, records)
    except LostBeyondScheme:
        return False
    return True


def agreed(found: list[Holdings | None]) -> Agreed:
    """From every rank's look."""
    holders: dict[int, dict[Copy, int]] = {}
    for rank, holdings in enumerate(found):
        for step, copy in holdings.committed.items() if holdings else ():
            holders.setdefault(step, {}).setdefault(copy, rank)
    saves = {step: sorted(ranks.items(), reverse=True) for step, ranks in holders.items()}
    unequal = {
        step
        for holdings in found
        if holdings
        for step, [(copy, _), *_] in saves.items()
        if holdings.committed.get(step, None if step in holdings.uncommitted | holdings.damaged else copy) != copy
    }
    damaged = {step for holdings in found if holdings for step in holdings.damaged} - saves.keys()
    return Agreed(saves, tuple(sorted(unequal)), tuple(sorted(damaged)))
