"""Restoring with a node-local tier: the newest step over all tiers, from the nodes while they can still give it back.

    list      leaders list the steps whose manifest they have                                  then all agree
    survey    every rank: what its node holds of the newest one
    rebuild   what lies elsewhere is sent, what is lost is made again, verified, protected     then all agree
    restore   as from any directory: each rank reads on its own node

Where more is lost than the scheme gives back, every rank gets the same account of it; and the shards that are missing
come from the shared or the remote tier, if the very same save is committed there, onto the nodes, where they are
protected again with the others. Else the loss costs that step its place among the nodes' steps; then the whole step is
tried in the other tiers, and after that the next older one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mpi_ckpt.checkpoint import filling, local_fetch, restore, steps
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local_holdings import Copy
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.checkpoint.local_whole import bring, make_whole
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions, Template, check_world_size, open_copies
from mpi_ckpt.checkpoint.tiers import Copies, Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import (
    CheckpointError,
    InvalidManifest,
    LayoutMismatch,
    RankSilent,
    RemoteFailed,
    UnknownSchema,
)
from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.names import manifest_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restoring:
    """One restore: where from, by whom, and into what."""

    council: Council
    tier: LocalTier
    tiers: Tiers
    template: Template
    options: RestoreOptions
    on_event: Callable[[Event], None]


def restore_nearest(task: Restoring) -> Opened | None:
    """**Collective.** Fill the leaves from the nearest tier that has the newest step, or the one asked for.

    None when no tier has any step. Raises what `restore.restore` does; what the nodes could not give back, where
    nothing else is left.
    """
    council, options = task.council, task.options
    here = task.tier.agree(council)
    near, damaged = here.latest, here.damaged
    far = council.share(lambda: _list_far(task.tiers, otherwise=bool(near)))
    found = sorted({*near, *damaged, *far})
    if options.step is not None and found and options.step not in found:
        raise restore.not_committed(task.tiers.root, options.step, found)
    lost: dict[int, CheckpointError] = {}
    for step in reversed(found):
        if options.step not in (None, step):
            continue
        opened = None
        if step in damaged:
            lost[step] = _unreadable(task.tier.directory(step))
            _account(task, step, lost[step])
        elif step in near and not (step in far and _is_newer(task, step, near[step][0])):
            try:
                opened = _from_nodes(task, step, near[step][1], further=step in far)
            except restore.DAMAGE as error:
                lost[step] = error
                _account(task, step, error)
        if opened is None and step in far:
            try:
                opened = restore.restore_step(council, task.tiers, task.template, options, step)
            except restore.DAMAGE as error:
                restore.give_up(council, task.tiers, options, step, error, set_aside=True, on_event=task.on_event)
                continue
            if opened is None:  # pruned by a writer beside this reader, who has newer ones
                return restore_nearest(task)
        if opened is not None:
            _set_aside(task, [*lost])
            return opened
    if lost:
        raise _nothing_left(*next(iter(lost.items())))
    return restore.restore(council, task.tiers, task.template, options, set_aside=True, on_event=task.on_event)


def _unreadable(directory: Path) -> CheckpointError:
    return InvalidManifest(
        "no node has a manifest of the step that can be read",
        path=manifest_path(directory),
        found="damaged copies only",
        expected="at least one that is as it was written",
    )


def _nothing_left(step: int, error: CheckpointError) -> CheckpointError:
    """What was lost of the newest step that the nodes have had, for whoever has to go on without any."""
    error.what = f"no tier has a step that can be restored; of step {step} on the nodes: {error.what}"
    error.action = (
        "Bring a lost node or its disk back, or start anew, on purpose, with another directory for each tier."
    )
    return error


def _is_newer(task: Restoring, step: int, here: Copy) -> bool:
    """**Collective.** Whether the other tiers have a later save of the step: of a launch that did not use the nodes."""

    def compare() -> bool:
        try:
            there = task.tiers.open(step).manifest
        except UnknownSchema:
            raise
        except CheckpointError as error:
            logger.warning("step %d: the copy beyond the nodes cannot be compared with theirs: %s", step, error)
            return False
        # A launch without nodes does not count its saves: then the clocks decide.
        later = (there.save_count or here.save_count, there.created) > (here.save_count, here.created)
        return there.save_id != here.save_id and later

    return task.council.share(compare)


def _list_far(tiers: Tiers, otherwise: bool) -> list[int]:
    try:
        return tiers.list_steps()
    except RemoteFailed as error:
        if not otherwise:
            raise
        logger.warning("going by the steps on the nodes alone: %s", error)
        return []


def _account(task: Restoring, step: int, error: CheckpointError, fetched: dict[str, list[str]] | None = None) -> None:
    """**Local.** Say what is lost: the error names ranks and domains; and which shards came from which other tier, if
    these were all that it took."""
    if task.council.rank == 0:
        origins = " and ".join(f"{', '.join(files)} from the {tier} tier" for tier, files in (fetched or {}).items())
        way_on = origins or "another copy or step"
        logger.warning("step %d cannot be restored from the nodes alone, going on with %s: %s", step, way_on, error)
    task.on_event({"event": "local_loss", "step": step, "error": str(error), "fetched": fetched or {}})


def _set_aside(task: Restoring, lost: list[int]) -> None:
    """**Collective.** Take lost steps out of the count on every node, reversibly, now that something else was found.

    Not before: with nothing else, a node that comes back is the only hope, and a launch must not start afresh.
    """

    def set_aside() -> None:
        for directory in map(task.tier.directory, lost if task.tier.leads else ()):
            if steps.is_committed(directory):
                steps.set_aside(directory)

    if lost and task.options.step is None:
        task.council.everywhere(set_aside)


def _from_nodes(task: Restoring, step: int, holder: int, further: bool) -> Opened:
    """**Collective.** With help, where the nodes have lost more than they can give back, from the very same save in a
    tier `further` away, if it is there. Raises restore.DAMAGE."""
    try:
        return _intact(task, step, holder)
    except LostBeyondScheme as error:
        manifest = task.tier.read_manifest(task.council, step, holder)
        far = task.council.share(lambda: _same_save(task.tiers, manifest)) if further else None
        if far is None:
            raise
        loss = error
    return _completed(task, manifest, holder, far, loss)


def _same_save(tiers: Tiers, here: ShardManifest) -> Copies | None:
    try:
        there = tiers.open(here.step)
    except UnknownSchema:
        raise
    except CheckpointError as error:
        logger.warning("step %d: its copy beyond the nodes cannot be opened: %s", here.step, error)
        return None
    return there if there.manifest.save_id == here.save_id else None


def _completed(task: Restoring, manifest: ShardManifest, holder: int, far: Copies, loss: LostBeyondScheme) -> Opened:
    """**Collective.** What the nodes hold or can make again comes from them, the rest from `far`, and stays on them.

    Raises `loss` where that cannot be done: `far` alone may still do.
    """
    council, step = task.council, manifest.step
    brought: dict[str, list[str]] = {}
    had: set[int] = set()
    error = loss
    while missing := [rank for rank in error.needed if rank not in had]:
        try:
            for origin, files in bring(council, task.tier, manifest, far, missing).items():
                brought[origin] = sorted([*brought.get(origin, []), *files])
            had |= {*missing}
            opened = _intact(task, step, holder)
        except LostBeyondScheme as another:
            error = another
        except (UnknownSchema, RankSilent, LayoutMismatch):
            raise
        except CheckpointError as failure:  # a full disk, a damaged copy
            if failure.silent:
                raise
            if council.rank == 0:
                logger.warning("step %d cannot be made whole on the nodes: %s", step, failure)
            break
        else:
            _account(task, step, loss, brought)
            return opened
    raise loss


def _intact(task: Restoring, step: int, holder: int) -> Opened:
    """**Collective.** Once as the files' sizes promise; should one turn out to be damaged, again without it."""
    try:
        return _attempt(task, step, holder, verify=False)
    except (LostBeyondScheme, UnknownSchema):
        raise
    except restore.DAMAGE as error:
        if task.council.rank == 0:
            logger.warning("step %d: a file on a node is damaged; all are read, and it is made again: %s", step, error)
        return _attempt(task, step, holder, verify=True)


def _attempt(task: Restoring, step: int, holder: int, verify: bool) -> Opened:
    council, tier = task.council, task.tier
    manifest = tier.read_manifest(council, step, holder)
    here = Copies(manifest, (tier.directory(step),), "local")
    check_world_size(here, council.size, task.options)
    make_whole(council, tier, manifest, verify, task.on_event)
    tier.spread_manifest(council, step, holder, wanted=lambda _: True)
    with local_fetch.Guests(council, tier, manifest) as guests:
        if manifest.world_size != council.size:
            guests.fetch(local_fetch.for_values(council, here))
        opened = council.share(lambda: open_copies(here, council.size, task.options))
        opened = replace(opened, copies=here)  # rank 0's, with this rank's own directory
        needed = council.everywhere(lambda: local_fetch.for_arrays(manifest, task.template(opened), task.options.keys))
        guests.fetch(needed)
        filling.fill(council, opened, task.template, task.options)
    return opened
