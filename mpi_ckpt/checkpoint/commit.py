"""THE commit protocol: how a step becomes visible, once and whole.

    prepare   rank 0 draws the save id, cleans leftovers and makes the step's directory       then all agree
    write     every rank: rankNNNNN-<save id>.h5.tmp, data, fsync; then rename to rankNNNNN.h5, fsync of the directory
    vote      every rank reports its file's digests, or its error                             any error: nothing commits
    commit    rank 0, holding all reports: is the lock still ours? then manifest.json by rename, fsync of the directory
    learn     every rank hears the outcome from rank 0; only now is anything older deleted

A step exists if and only if its `manifest.json` does. Before that rename no reader looks at the files; after it every
file is complete, because its rank has said so. A failure is undone in the reverse order: the manifest first, then the
shards; what cannot be undone for certain is left alone and reported as such.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.checkpoint.environment import environment
from mpi_ckpt.checkpoint.snapshot import Snapshot
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, DirectoryInUse, OutcomeUnknown, RankSilent, SaveFailed, StepExists
from mpi_ckpt.storage import atomic, lock, names
from mpi_ckpt.storage.direct import SLOW_DISK
from mpi_ckpt.storage.manifest import ArrayRecord, ShardManifest, build_manifest, write_manifest
from mpi_ckpt.storage.shard_file import ShardAttributes, ShardImage, ShardRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK = "Every file was left as it is. See that ranks and disks answer, then check the step with `verify`."


@dataclass(frozen=True)
class Request:
    """What is to be saved as which step, beside the ranks' own snapshots; equal on all ranks."""

    root: Path
    step: int
    launch_id: str  # the one that holds the writer's lock
    nbytes: int  # of all ranks' arrays
    overwrite: bool = False
    meta: dict[str, Any] = field(default_factory=dict)
    index: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    wall_clock_seconds: float = 0.0
    save_count: int = 0  # see ShardManifest
    shared: bool = False  # to the shared tier in any case, whatever the interval of the node-local one
    save_id: str | None = None  # that of the same save in another tier; a new one is drawn for None

    @property
    def directory(self) -> Path:
        return names.step_dir(self.root, self.step)


@dataclass(frozen=True)
class Place:
    """Where this rank's file of a save goes, as agreed."""

    path: Path
    temporary: Path  # with the save id in its name: an orphan of an older launch must not write into the same file
    attributes: ShardAttributes
    replaces: bool  # files of an older save of the same step lie beside it


class Written(NamedTuple):
    """A rank's vote: its file, and the seconds that it took."""

    record: ShardRecord
    seconds: float


def commit(council: Council, request: Request, snapshot: Snapshot) -> float:
    """**Collective.** Save every rank's snapshot as one step: the whole protocol.

    Returns the seconds that the slowest rank took to write its file. Raises SaveFailed on every rank when any rank
    failed: what was visible before is visible then, and this save's files go, at the latest with the next save.
    """
    place = prepare(council, request)
    return finish(council, request, snapshot, place, lambda: write(request, snapshot, place))


def prepare(council: Council, request: Request) -> Place:
    """**Collective.** Agree on a place for the step; every earlier leftover is gone then."""
    save_id, suffix = council.agree(lambda: request.step, lambda found: _prepare(request, found), otherwise=SaveFailed)
    path = request.directory / names.shard_name(council.rank, suffix)
    temporary = names.tmp(request.directory / names.shard_name(council.rank, save_id))
    attributes = ShardAttributes(save_id, council.rank, council.size, request.step)
    return Place(path, temporary, attributes, replaces=suffix is not None)


def write(request: Request, snapshot: Snapshot, place: Place) -> Written:
    """**Local.** This rank's own file, complete and durable under its final name."""
    return write_image(request, ShardImage(snapshot.blocks, snapshot.values, place.attributes), place)


def write_image(request: Request, image: ShardImage, place: Place) -> Written:
    """**Local.** The same of a file that is laid out already."""
    began = time.monotonic()
    record = image.write(place.temporary)
    lock.check_owner(request.root, request.launch_id)  # an orphan must not replace a file of its successor
    atomic.publish(place.temporary, place.path)
    return Written(record._replace(path=place.path.name), time.monotonic() - began)


def finish(
    council: Council, request: Request, snapshot: Snapshot, place: Place, written: Callable[[], Written]
) -> float:
    """**Collective.** Vote and commit: `written` gives what this rank wrote, or raises what went wrong.

    Returns the seconds that the slowest rank took to write.
    """

    def decide(votes: list[Written]) -> float:
        records = [vote.record for vote in votes]
        publish(request, manifest_of(request, place.attributes.save_id, snapshot.description.arrays, records))
        return max(vote.seconds for vote in votes)

    nbytes = snapshot.description.nbytes
    return conclude(council, request, place, written, decide, [place.temporary, place.path], nbytes)


def conclude(
    council: Council,
    request: Request,
    place: Place,
    work: Callable[[], T],
    decide: Callable[[list[T]], float],
    files: Sequence[Path],
    nbytes: int,
) -> float:
    """**Collective.** Vote and commit: all ranks' `work`, then rank 0's `decide`, which publishes; what that returns.

    `files` are this rank's, which go where it fails for certain; `nbytes` what it writes.
    """
    try:
        outcome = council.agree(work, decide, otherwise=SaveFailed, extra_time=nbytes / SLOW_DISK)
    except OutcomeUnknown:
        raise
    except RankSilent as error:
        raise outcome_unknown(place, error) from error
    except CheckpointError:
        _withdraw(request, files)
        raise
    if council.rank == 0 and place.replaces:
        steps.remove_unlisted(request.directory)  # the files that an overwrite has replaced
    return outcome


def outcome_unknown(place: Place, error: RankSilent) -> OutcomeUnknown:
    """The error where nobody can say what rank 0 decided; who was silent stays known."""
    unknown = OutcomeUnknown(f"outcome unknown: {error.what}", path=place.path, rank=error.rank, action=_LOOK)
    unknown.silent = error.silent
    return unknown


def _prepare(request: Request, found: list[int]) -> tuple[str, str | None]:
    """Rank 0: a directory to write into, the save id, and the id again if file names have to carry it."""
    check_same_step(request, found)
    lock.check_owner(request.root, request.launch_id)
    if steps.is_committed(request.directory) and not request.overwrite:
        raise step_exists(request.root, request.step)
    steps.clean(request.root)
    warn_of_later_steps(request.step, names.list_steps(request.root))
    _check_room(request)
    atomic.make_dir(request.directory)
    save_id = request.save_id or names.new_save_id()
    # Files are written once and never changed: beside an older set of shards the new ones take names of their own.
    return save_id, save_id if names.own_files(request.directory) else None


def check_same_step(request: Request, found: list[int]) -> None:
    """**Local.** Raise SaveFailed unless all ranks save this step: one that is elsewhere would write into another's."""
    if set(found) != {request.step}:
        raise SaveFailed(
            "the ranks save different steps",
            path=request.root,
            found=f"steps {', '.join(map(str, sorted(set(found))))}",
            expected="the same step on every rank",
            action="See why the ranks' loops have come apart.",
        )


def warn_of_later_steps(step: int, committed: Collection[int]) -> None:
    """**Local.** Log that a restart would not take what is being saved."""
    newest = max(committed, default=0)
    if newest > step:
        text = "step %d is saved while step %d is there, which a restart would take: see `discard_after`"
        logger.warning(text, step, newest)


def _check_room(request: Request) -> None:
    free = shutil.disk_usage(request.root).free
    if free < request.nbytes:
        raise SaveFailed(
            f"not enough room on the disk to save step {request.step}",
            path=request.root,
            found=f"{free} bytes free",
            expected=f"at least {request.nbytes} bytes",
            action="Free some space, or keep fewer steps.",
        )


def publish(request: Request, manifest: ShardManifest) -> None:
    """**Local.** On rank 0, after every rank voted yes: make the step visible, or leave no trace of trying."""
    lock.check_owner(request.root, request.launch_id)
    path = names.manifest_path(request.directory)
    before = path.read_bytes() if path.exists() else None  # the manifest that an overwrite replaces
    try:
        write_manifest(request.directory, manifest)
    except OSError as error:
        _unpublish(path, before, error)
        raise


def _unpublish(path: Path, before: bytes | None, cause: OSError) -> None:
    """Backwards: what readers see goes first. Only when that is durable may the caller's shards be removed."""
    try:
        atomic.remove(names.tmp(path), missing_ok=True)
        if before is None:
            atomic.remove(path, missing_ok=True)
        else:
            atomic.write_file(path, before)
    except OSError as error:
        raise OutcomeUnknown(
            f"outcome unknown: writing the manifest failed ({cause}) and so did taking it back ({error})",
            path=path,
            rank=0,
            expected="a manifest that is either durable or gone",
            action=_LOOK,
        ) from cause


def _withdraw(request: Request, files: Sequence[Path]) -> None:
    """This rank's files of a save that did not commit. What cannot be removed now is garbage for the next writer."""
    try:
        lock.check_owner(request.root, request.launch_id)  # else these names are those of a successor's files
        atomic.remove(*files, missing_ok=True)
    except (OSError, DirectoryInUse) as error:
        logger.warning("cannot remove a file of a failed save, going on: %s", error)


def manifest_of(
    request: Request, save_id: str, arrays: dict[str, ArrayRecord], records: list[ShardRecord]
) -> ShardManifest:
    """**Local.** The manifest of what the ranks have written. Raises LayoutMismatch."""
    return build_manifest(
        records,
        step=request.step,
        save_id=save_id,
        arrays=arrays,
        index=request.index,
        meta=request.meta,
        metrics=request.metrics,
        environment=environment(),
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        wall_clock_seconds=request.wall_clock_seconds,
        save_count=request.save_count,
    )


def step_exists(root: Path, step: int) -> StepExists:
    """The error for saving a committed step again without being asked to."""
    return StepExists(
        f"step {step} is committed already",
        path=names.step_dir(root, step),
        expected="a step that does not exist",
        action="Save another step, or pass overwrite=True after a rollback.",
    )
