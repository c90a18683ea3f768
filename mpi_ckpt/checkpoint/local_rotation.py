"""Old steps leave the nodes: the manifests first, on all of them, and the files once all agree that these are gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mpi_ckpt.checkpoint import retention, steps
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.storage import atomic, names

logger = logging.getLogger(__name__)


class _Look(NamedTuple):
    """A leader's steps: committed ones, those of them that are pinned, and those set aside as damaged."""

    committed: tuple[int, ...]
    pinned: tuple[int, ...]
    aside: tuple[int, ...]


def rotate(council: Council, tier: LocalTier, on_event: Callable[[Event], None], spared: Collection[int]) -> None:
    """**Collective.** Delete what has been pushed out, and steps set aside that a newer one has overtaken.

    Not those `spared`: what was just saved, even if later steps of another attempt are there, and what was restored.
    """

    def look() -> _Look:
        if not tier.leads:
            return _Look((), (), ())
        tier.check_still()
        committed = names.list_steps(tier.root)
        pinned = [step for step in committed if steps.is_pinned(tier.directory(step))]
        return _Look(tuple(committed), tuple(pinned), tuple(steps.list_set_aside(tier.root)))

    def choose(looks: list[_Look]) -> list[int]:
        committed, pinned, aside = ({step for look in looks for step in look[field]} for field in range(3))
        doomed = retention.choose(sorted(committed), retention.Policy(tier.keep), held=frozenset(pinned))
        newest = max(committed, default=-1)
        return sorted({*doomed, *(step for step in aside - committed if step <= newest)} - {*spared})

    doomed = council.agree(look, choose)
    for step in delete(council, tier, doomed) if doomed else ():
        on_event({"event": "prune", "step": step, "tier": "local"})


def delete(council: Council, tier: LocalTier, doomed: Sequence[int]) -> list[int]:
    """**Collective.** Delete steps from all nodes, in the order given; those that are gone. The others are logged."""

    def uncommit() -> list[int]:
        return [step for step in doomed if tier.leads and not _done(tier, step, _remove_manifest)]

    def remove() -> None:
        for step in gone if tier.leads else ():
            _done(tier, step, lambda tier, step: steps.delete(tier.directory(step)))

    stuck = council.agree(uncommit, lambda found: sorted({step for steps in found for step in steps}))
    gone = [step for step in doomed if step not in stuck]
    council.everywhere(remove)
    return gone


def _done(tier: LocalTier, step: int, work: Callable[[LocalTier, int], None]) -> bool:
    try:
        work(tier, step)
    except FileNotFoundError:
        return True
    except OSError as error:
        logger.warning("cannot delete step %d from this node, going on: %s", step, error)
        return False
    return True


def _remove_manifest(tier: LocalTier, step: int) -> None:
    path = names.manifest_path(tier.directory(step))
    if path.exists():
        atomic.remove(path)
