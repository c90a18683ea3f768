"""Restoring with a node-local tier: the newest step over all tiers, from the nodes while they can still give it back.

    list      leaders list the steps whose manifest they have                                  then all agree
    survey    every rank: what its node holds of the newest one
    rebuild   what lies elsewhere is sent, what is lost is made again, verified, protected     then all agree
    restore   as from any directory: each rank reads on its own node

More loss than the scheme gives back costs that step its place among the nodes' steps, on every rank with the same
account of it; the next older step is tried, or the shared and the remote tier, whichever has the newest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mpi_ckpt.checkpoint import local_fetch, restore, steps
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local_tier import Copy, LocalTier
from mpi_ckpt.checkpoint.restore import Opened, Options, Template
from mpi_ckpt.checkpoint.tiers import Copies, Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, CorruptShard, InvalidManifest, MissingShard, RemoteFailed, UnknownSchema
from mpi_ckpt.redundancy.protect import Protection, Source
from mpi_ckpt.redundancy.rebuild import rebuild
from mpi_ckpt.redundancy.recovery import LostBeyondScheme, Report
from mpi_ckpt.redundancy.survey import survey
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.names import manifest_path

logger = logging.getLogger(__name__)

_DAMAGE = (MissingShard, CorruptShard, InvalidManifest)


@dataclass(frozen=True)
class Restoring:
    """One restore: where from, by whom, and into what."""

    council: Council
    tier: LocalTier
    tiers: Tiers
    template: Template
    options: Options
    on_event: Callable[[Event], None]


def restore_nearest(task: Restoring) -> Opened | None:
    """**Collective.** Fill the leaves from the nearest tier that has the newest step, or the one asked for.

    None when no tier has any step. Raises what `restore.restore` does; what the nodes could not give back, where no
    other tier has a step.
    """
    council, options = task.council, task.options
    near = task.tier.agree(council).latest
    far = council.share(lambda: _list_far(task.tiers, otherwise=bool(near)))
    lost: list[int] = []
    loss: CheckpointError | None = None
    for step in sorted({*near, *far}, reverse=True):
        if options.step not in (None, step):
            continue
        if step in near and not (step in far and _is_newer(task, step, near[step][0])):
            try:
                opened = _from_nodes(task, step, near[step][1])
                _set_aside(task, lost)
                return opened
            except _DAMAGE as error:
                lost.append(step)
                loss = error
                _account(task, step, error)
        if step in far:  # from here on these tiers alone count, as they do without nodes
            found = restore.restore(council, task.tiers, task.template, options, set_aside=True, on_event=task.on_event)
            _set_aside(task, lost)
            return found
    if loss is not None:
        raise loss
    return restore.restore(council, task.tiers, task.template, options, set_aside=True, on_event=task.on_event)


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
        return there.save_id != here.save_id and there.created > here.created

    return task.council.share(compare)


def _list_far(tiers: Tiers, otherwise: bool) -> list[int]:
    try:
        return tiers.list_steps()
    except RemoteFailed as error:
        if not otherwise:
            raise
        logger.warning("going by the steps on the nodes alone: %s", error)
        return []


def _account(task: Restoring, step: int, error: CheckpointError) -> None:
    """**Local.** Say what is lost: the error names ranks and domains."""
    if task.council.rank == 0:
        logger.warning("step %d cannot be restored from the nodes, going on with another copy or step: %s", step, error)
    task.on_event({"event": "local_loss", "step": step, "error": str(error)})


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


def _from_nodes(task: Restoring, step: int, holder: int) -> Opened:
    """**Collective.** Once as the files' sizes promise; should one turn out to be damaged, again without it."""
    try:
        return _attempt(task, step, holder, verify=False)
    except (LostBeyondScheme, UnknownSchema):
        raise
    except _DAMAGE as error:
        if task.council.rank == 0:
            logger.warning("step %d: a file on a node is damaged; all are read, and it is made again: %s", step, error)
        return _attempt(task, step, holder, verify=True)


def _attempt(task: Restoring, step: int, holder: int, verify: bool) -> Opened:
    council, tier = task.council, task.tier
    manifest = _read_manifest(council, tier, step, holder)
    here = Copies(manifest, (tier.directory(step),))
    restore.check_world_size(here, council.size, task.options)
    make_whole(council, tier, manifest, verify, task.on_event)
    tier.spread_manifest(council, step, holder, wanted=lambda _: True)

    def fetch(ranks: set[int]) -> None:
        local_fetch.fetch(council, tier, manifest, ranks)

    if manifest.world_size != council.size:
        fetch(local_fetch.for_values(council, here))
    opened = council.share(lambda: restore.open_copies(here, council.size, task.options))
    opened = replace(opened, copies=here)  # rank 0's, with this rank's own directory
    fetch(council.everywhere(lambda: local_fetch.for_arrays(manifest, task.template(opened), task.options.keys)))
    restore.fill(council, opened, task.template, task.options)
    return opened


def _read_manifest(council: Council, tier: LocalTier, step: int, holder: int) -> ShardManifest:
    """**Collective.** The step's manifest as rank `holder` has it."""
    path = manifest_path(tier.directory(step))
    text = council.agree(lambda: path.read_text() if council.rank == holder else "", lambda found: found[holder])
    return ShardManifest.from_json(text, path)


def make_whole(
    council: Council, tier: LocalTier, manifest: ShardManifest, verify: bool, on_event: Callable[[Event], None]
) -> None:
    """**Collective.** Bring every rank's own files to its own node, with their redundancy.

    With `verify` each file is read first, and a damaged one made again. Raises LostBeyondScheme, CorruptShard.
    """
    directory = tier.directory(manifest.step)
    mine = range(council.rank, manifest.world_size, council.size)
    found = council.everywhere(lambda: survey(directory, manifest.save_id, verify=mine if verify else ()))
    report = rebuild(council, directory, found, tier.domain, save_id=manifest.save_id)
    if report.weak and manifest.world_size == council.size:
        report = _protect_anew(council, tier, directory, manifest, report)
    done = {name: list(getattr(report, name)) for name in ("moved", "rebuilt", "encoded", "weak")}
    if any(done.values()):
        on_event({"event": "rebuild", "step": manifest.step, **done})


def _protect_anew(
    council: Council, tier: LocalTier, directory: Path, manifest: ShardManifest, report: Report
) -> Report:
    """**Collective.** New groups for ranks that have come to share a failure domain with another of their group."""
    record = manifest.shards[council.rank]
    try:
        source = Source(record.path, record.nbytes, directory / record.path)
        protection = Protection(council, tier.scheme, tier.domain, source, directory, save_id=manifest.save_id)
        protection.write(lambda: record.sha256)
    except CheckpointError as error:
        if council.rank == 0:
            logger.warning("step %d is whole, but weaker than %s: %s", manifest.step, tier.scheme, error)
        return report
    return replace(report, weak=())
