"""Restoring with a node-local tier: the newest step over all tiers, from the nodes while they can still give it back.

    list      leaders list the steps whose manifest they have                                  then all agree
    survey    every rank: what its node holds of the newest one
    rebuild   what lies elsewhere is sent, what is lost is made again, verified, protected     then all agree
    restore   as from any directory: each rank reads on its own node

More loss than the scheme gives back costs that step its place among the nodes' steps, on every rank with the same
account of it; then the same step is tried in the shared and the remote tier, and after that the next older one.
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
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions, Template, check_world_size, open_copies
from mpi_ckpt.checkpoint.tiers import Copies, Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, CorruptShard, InvalidManifest, RemoteFailed, UnknownSchema
from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.descriptor import descriptor_name, read_descriptor
from mpi_ckpt.redundancy.protect import Protection, Source
from mpi_ckpt.redundancy.rebuild import rebuild
from mpi_ckpt.redundancy.recovery import Place, Report
from mpi_ckpt.redundancy.survey import Found, survey
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.names import manifest_path
from mpi_ckpt.storage.shard_check import verify_file

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
                opened = _from_nodes(task, step, near[step][1])
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


def make_whole(
    council: Council, tier: LocalTier, manifest: ShardManifest, verify: bool, on_event: Callable[[Event], None]
) -> None:
    """**Collective.** Bring every rank's own files to its own node, with their redundancy.

    With `verify` every file that lies on a node is read first, and a damaged one made again. Groups that survive fewer
    losses than those that could be formed now give way to new ones. Raises LostBeyondScheme, CorruptShard.
    """
    directory, save_id, records = tier.directory(manifest.step), manifest.save_id, manifest.shards

    def look(verify: bool) -> Found:
        read = _share(council, Place(tier.domain, str(directory)), manifest.world_size) if verify else range(0)
        return council.everywhere(lambda: survey(directory, save_id, records, verify=read))

    report = rebuild(council, directory, look, tier.domain, save_id=save_id, records=records, verify=verify)
    if manifest.world_size == council.size and _could_be_stronger(council, tier, directory, manifest):
        report = _protect_anew(council, tier, directory, manifest, report)
    done = {name: list(getattr(report, name)) for name in ("moved", "rebuilt", "encoded", "weak")}
    if any(done.values()):
        on_event({"event": "rebuild", "step": manifest.step, **done})


def _share(council: Council, place: Place, world_size: int) -> range:
    """**Collective.** The ranks of the save whose files, if they lie at `place`, this rank reads for its node."""
    places = council.agree(lambda: place, list)
    peers = [rank for rank, found in enumerate(places) if found == place]
    return range(peers.index(council.rank), world_size, len(peers))


def _could_be_stronger(council: Council, tier: LocalTier, directory: Path, manifest: ShardManifest) -> bool:
    """**Collective.** Whether groups of the present domains would survive more losses than those that there are."""
    path = directory / descriptor_name(manifest.shards[council.rank].path)
    return council.agree(lambda: read_descriptor(path).tolerance, lambda found: min(found)) < tier.tolerance


def _protect_anew(
    council: Council, tier: LocalTier, directory: Path, manifest: ShardManifest, report: Report
) -> Report:
    """**Collective.** New groups, for ranks that are in none, or share a failure domain with another of theirs.

    Raises CorruptShard for a file that is not what was saved: the old groups, which are left then, may give it back.
    """
    record = manifest.shards[council.rank]

    def digest() -> str:
        verify_file(directory / record.path, record)
        return record.sha256

    try:
        source = Source(record.path, record.nbytes, directory / record.path)
        protection = Protection(council, tier.scheme, tier.domain, source, directory, save_id=manifest.save_id)
        own = protection.write(digest)
    except CorruptShard:
        raise
    except CheckpointError as error:
        if council.rank == 0:
            logger.warning("step %d is whole, but weaker than %s: %s", manifest.step, tier.scheme, error)
        return report
    weak = own.ranks if own.tolerance < own.scheme.tolerance else ()
    return replace(report, weak=council.agree(lambda: weak, lambda found: tuple(sorted({*found} - {()}))))
