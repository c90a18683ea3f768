"""The commit protocol on node-local disks: one step, as many directories and manifests as nodes.

    prepare   all agree on the save id; every leader cleans its node and makes the step's directory;   then all agree
              parity groups are formed
    write     every rank: its file, as in `commit`, on its own node; and at the same time, from the same memory,
    protect   redundancy: parity and descriptors, durable on all nodes                                 then all agree
    vote      every rank reports its file; rank 0 makes the manifest of all, every rank gets it
    stage     every leader: is the lock still ours? manifest.json.tmp, the same bytes on every node    then all agree
    commit    every leader: rename, fsync of the directory                                             then all agree

Any one manifest commits the step: before the first rename every file and all parity is durable, so that whatever dies
afterwards, what is left is whole or can be made whole. Of two saves of one step the later wins. Only after the last
agreement is the save reported and anything older deleted. A failure is undone in the reverse order, each time with all
nodes: first the manifests, and only when none is left anywhere the files.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpi_ckpt.checkpoint import commit, steps
from mpi_ckpt.checkpoint.commit import Place, Request, Written, outcome_unknown
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.checkpoint.snapshot import Snapshot
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, DirectoryInUse, OutcomeUnknown, RankSilent, SaveFailed
from mpi_ckpt.redundancy.descriptor import descriptor_name, parity_name
from mpi_ckpt.redundancy.protect import Protection, Source
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.direct import SLOW_DISK
from mpi_ckpt.storage.shard_file import ShardAttributes, ShardImage
from mpi_ckpt.storage.staging import Lane

logger = logging.getLogger(__name__)

_LOOK = "Every file was left as it is. See that ranks and disks answer: the next launch finds the step whole or gone."


class Look(NamedTuple):
    """A rank's part of `prepare`: its step and bytes, and of its node what the leader sees there."""

    step: int
    nbytes: int
    domain: str
    root: str
    free: int | None = None
    committed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """This rank's file and where it goes; the request has the node's own directory as its root."""

    request: Request
    place: Place
    image: ShardImage
    protection: Protection


def prepare(council: Council, tier: LocalTier, request: Request, snapshot: Snapshot) -> Prepared:
    """**Collective.** Agree on a place for the step on every node. Raises StepExists, SaveFailed, DirectoryInUse."""
    request = replace(request, root=tier.root)
    nbytes = snapshot.description.nbytes

    def look() -> Look:
        mine = Look(request.step, nbytes, tier.domain, str(tier.root))
        if tier.leads:
            tier.check_still()
            free = shutil.disk_usage(tier.root).free
            mine = mine._replace(free=free, committed=tuple(names.list_steps(tier.root)))
        return mine

    save_id, committed = council.agree(look, lambda found: _decide(tier, request, found), otherwise=SaveFailed)

    def make() -> bool:
        if not tier.leads:
            return False
        steps.clean(tier.root, committed)
        atomic.make_dir(request.directory)
        return bool(names.own_files(request.directory))

    # Beside an older set of files, on whatever node, the new ones take names of their own on all.
    suffix = council.agree(make, lambda occupied: save_id if any(occupied) else None, otherwise=SaveFailed)
    path = request.directory / names.shard_name(council.rank, suffix)
    temporary = names.tmp(request.directory / names.shard_name(council.rank, save_id))
    attributes = ShardAttributes(save_id, council.rank, council.size, request.step)
    image = council.everywhere(lambda: ShardImage(snapshot.blocks, snapshot.values, attributes))
    source = Source(path.name, image.nbytes, image)
    protection = Protection(council, tier.scheme, tier.domain, source, request.directory, save_id=save_id)
    return Prepared(request, Place(path, temporary, attributes, replaces=suffix is not None), image, protection)


def write(prepared: Prepared) -> Written:
    """**Local.** This rank's own file on its node, complete and durable under its final name."""
    return commit.write_image(prepared.request, prepared.image, prepared.place)


@contextlib.contextmanager
def writing(prepared: Prepared) -> Iterator[Callable[[], Written]]:
    """**Local.** `write` in a thread of its own; gives what waits for it and returns or raises what it did."""
    lane = Lane("mpi_ckpt shard")
    try:
        yield lane.submit(write, prepared).result
    finally:
        lane.end()
        lane.join()


def finish(
    council: Council, tier: LocalTier, snapshot: Snapshot, prepared: Prepared, written: Callable[[], Written]
) -> float:
    """**Collective.** Protect, vote and commit: `written` waits for what this rank writes, and gives it, or raises.

    Returns the seconds that the slowest rank took to write. Raises SaveFailed, with no trace left; OutcomeUnknown.
    """
    request, place = prepared.request, prepared.place
    manifest = names.manifest_path(request.directory)

    def gather(votes: list[Written]) -> tuple[str, float]:
        records = [vote.record for vote in votes]
        made = commit.manifest_of(request, place.attributes.save_id, snapshot.description.arrays, records)
        return made.to_json(), max(vote.seconds for vote in votes)

    def stage() -> bytes | None:
        if not tier.leads:
            return None
        tier.check_still()
        atomic.stage_file(manifest, text)
        return manifest.read_bytes() if manifest.exists() else None

    try:
        prepared.protection.write(lambda: written().record.sha256)
        slow = snapshot.description.nbytes / SLOW_DISK
        text, slowest = council.agree(written, gather, otherwise=SaveFailed, extra_time=slow)
        before = council.everywhere(stage, otherwise=SaveFailed)
        _publish(council, tier, request, before)
    except OutcomeUnknown:
        raise
    except RankSilent as error:
        raise outcome_unknown(place, error) from error
    except CheckpointError:
        with contextlib.suppress(Exception):
            written()  # only when the file has got its name can it be taken away
        _withdraw(tier, request, place)
        raise
    if tier.leads and place.replaces:
        steps.remove_unlisted(request.directory)  # the files that an overwrite has replaced
    return slowest


def _decide(tier: LocalTier, request: Request, found: list[Look]) -> tuple[str, frozenset[int]]:
    """Rank 0: the save id, and the steps that are committed on any node."""
    commit.check_same_step(request, [look.step for look in found])
    committed = frozenset(step for look in found for step in look.committed)
    if request.step in committed and not request.overwrite:
        raise commit.step_exists(tier.root, request.step)
    commit.warn_of_later_steps(request.step, committed)
    _check_room(tier.scheme, request.step, found)
    return names.new_save_id(), committed


def _check_room(scheme: Scheme, step: int, found: list[Look]) -> None:
    for rank, leader in enumerate(found):
        if leader.free is None:
            continue
        here = [look for look in found if (look.domain, look.root) == (leader.domain, leader.root)]
        needed = sum(scheme.stored_bytes(look.nbytes) for look in here)
        if leader.free < needed:
            raise SaveFailed(
                f"not enough room on the disk of {leader.domain} to save step {step}",
                path=leader.root,
                rank=rank,
                found=f"{leader.free} bytes free",
                expected=f"at least {needed} bytes for {len(here)} ranks with {scheme}",
                action="Free some space, keep fewer steps (local_keep), or take a scheme that stores less.",
            )


def _publish(council: Council, tier: LocalTier, request: Request, before: bytes | None) -> None:
    """**Collective.** Every node's manifest in place, or none: of an overwritten save then again that of `before`."""
    path = names.manifest_path(request.directory)

    def rename() -> None:
        if tier.leads:
            atomic.publish(names.tmp(path), path)

    def take_back() -> None:
        if not tier.leads:
            return
        if before is not None:
            atomic.write_file(path, before)
        else:
            atomic.remove(path, missing_ok=True)

    try:
        council.agree(rename, lambda _: None, otherwise=SaveFailed)
    except RankSilent:
        raise
    except CheckpointError as cause:
        try:
            council.agree(take_back, lambda _: None, otherwise=OutcomeUnknown)
        except CheckpointError as error:
            raise OutcomeUnknown(
                f"outcome unknown: committing failed ({cause.what}) and so did taking it back ({error.what})",
                path=error.path or path,
                rank=error.rank,
                expected="a manifest that is durable on every node, or gone",
                action=_LOOK,
            ) from error
        raise


def _withdraw(tier: LocalTier, request: Request, place: Place) -> None:
    """This rank's files of a save that did not commit. What cannot be removed now is garbage for the next writer."""
    name, directory = place.path.name, request.directory
    files = [place.temporary, place.path, directory / parity_name(name), directory / descriptor_name(name)]
    if tier.leads:
        files.insert(0, names.tmp(names.manifest_path(directory)))
    try:
        tier.check_still()  # else these names are those of a successor's files
        atomic.remove(*files, missing_ok=True)
    except (OSError, DirectoryInUse) as error:
        logger.warning("cannot remove a file of a failed save, going on: %s", error)
