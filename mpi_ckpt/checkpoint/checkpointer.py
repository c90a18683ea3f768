"""The one public class: when to save, what to keep, where to continue."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpi_ckpt.checkpoint import commit, restore, retention, snapshot, steps
from mpi_ckpt.checkpoint.background import Background
from mpi_ckpt.checkpoint.cadence import Cadence
from mpi_ckpt.checkpoint.state import State, walk
from mpi_ckpt.comm.agreement import DEFAULT_TIMEOUT, Council
from mpi_ckpt.comm.threads import threads_may_communicate
from mpi_ckpt.errors import CheckpointError, UnsupportedState
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.lock import WriterLock
from mpi_ckpt.storage.manifest import ShardManifest

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Index = dict[str, tuple[int, tuple[int, ...]]]

_EXIT_PATIENCE = 10.0  # seconds that an exception on its way out of `with` waits for the save in flight


@dataclass(frozen=True)
class Found:
    """What `restore` found: the step, the application's `meta`, and the whole manifest."""

    step: int
    meta: dict[str, Any]
    manifest: ShardManifest


class Checkpointer:
    """Saves and restores the state of the ranks of `comm` in the directory `root`, one step a sub-directory.

    Use it as a context manager. All ranks of `comm` call its collective methods in the same order with the same
    arguments. `every` is '500steps', '30s', '10min', 'auto' (as often as pays, given `mean_time_between_failures`), or
    None (only `save` saves). The newest `keep` steps stay; None keeps all. With `async_io` a save returns as soon as
    the state is copied, and commits by itself. `timeout` is the number of seconds after which a silent rank fails a
    save. `on_event` is called on every rank with a dict, at times from another thread. A `read_only` checkpointer takes
    no lock and changes nothing.
    """

    def __init__(
        self,
        root: str | Path,
        comm: MPI.Comm,
        *,
        every: str | None = None,
        mean_time_between_failures: str = "1d",
        keep: int | None = 3,
        async_io: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
        on_event: Callable[[Event], None] | None = None,
        read_only: bool = False,
    ) -> None:
        """**Collective.** Make `root` and take its writer's lock. Raises DirectoryInUse; ValueError for an option."""
        self.root = Path(root)
        self._cadence = Cadence.parse(every, mean_time_between_failures)
        self._keep = _check_keep(keep)
        self._on_event = on_event or (lambda event: None)
        self._read_only = read_only
        # Two activities on one communicator would meet each other's messages: each has its own.
        self._decisions = Council(comm, timeout)
        self._commits = Council(comm, timeout)
        self._background = Background("mpi_ckpt commit") if async_io and threads_may_communicate() else None
        self._buffers = snapshot.Buffers() if self._background else None
        self._lock: WriterLock | None = None
        self._launch_id = "" if read_only else self._decisions.share(self._take_lock)
        self._began = self._last_save = time.monotonic()
        self._seconds_before = 0.0  # of the launches that this one continues
        self._cost: float | None = None  # seconds that the last save kept the application waiting
        self._held: int | None = None  # the step restored from: kept until a newer one commits

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, state: State, **options: Any) -> bool:
        """**Collective.** `save(step, state, **options)` if `every` says so; whether it did.

        Rank 0's clock decides for all. An error of the save in flight is raised here as soon as rank 0 knows of it.
        """
        due, finished = False, False
        if self._cadence.needs_clock or self._in_flight:
            elapsed = time.monotonic() - self._last_save
            mine = self._cadence.due(step, elapsed, self._cost), self._in_flight and self._finished()
            due, finished = self._decisions.broadcast(mine)
        else:
            due = self._cadence.due(step, 0.0, None)
        if finished:
            self.wait_until_finished()
        if due:
            self.save(step, state, **options)
        return due

    def save(
        self,
        step: int,
        state: State,
        *,
        meta: dict[str, Any] | None = None,
        index: Index | None = None,
        overwrite: bool = False,
    ) -> None:
        """**Collective.** Save `state` as `step`; with `async_io` return once it is copied.

        `meta` is small JSON of the application's own, `index` maps names to `(start, shape)` intervals of the flat
        space of the state's 1-d arrays. Raises StepExists unless `overwrite`; UnsupportedState or LayoutMismatch for a
        state that cannot be saved; SaveFailed when nothing was committed, here or for the save before this one.
        """
        began = time.monotonic()
        self.wait_until_finished()
        request = commit.Request(
            self.root, _check_step(step), self._launch_id, overwrite, meta or {}, index or {}, self.wall_clock_seconds
        )
        taken: list[snapshot.Snapshot] = []

        def stage() -> snapshot.Description:
            self._check_writable()
            _check_meta(request.meta)
            taken.append(snapshot.take(walk(state), self._decisions.rank, self._buffers))
            return taken[0].description

        def check(descriptions: list[snapshot.Description]) -> int:
            snapshot.check_agreement(descriptions)
            if steps.is_committed(request.directory) and not overwrite:
                raise commit.step_exists(request)
            return sum(description.nbytes for description in descriptions)

        nbytes = self._decisions.agree(stage, check)
        self._last_save = time.monotonic()
        if self._background:
            self._background.start(lambda: self._commit(request, taken[0], nbytes, began))
        else:
            self._commit(request, taken[0], nbytes, began)
        self._cost = time.monotonic() - began
        self._on_event({"event": "checkpoint", "step": step, "nbytes": nbytes, "stall_seconds": self._cost})

    def _commit(self, request: commit.Request, taken: snapshot.Snapshot, nbytes: int, began: float) -> None:
        """The protocol, and what may follow only after it; in the background when saving is asynchronous."""
        commit.commit(self._commits, request, taken)
        seconds = time.monotonic() - began
        self._on_event({"event": "commit", "step": request.step, "nbytes": nbytes, "commit_seconds": seconds})
        if self._held is not None and request.step > self._held:
            self._held = None
        for step in self._commits.share(self._prune):
            self._on_event({"event": "prune", "step": step})

    def _prune(self) -> list[int]:
        """Rank 0: retention."""
        committed = names.list_steps(self.root)
        kept = frozenset(s for s in committed if s == self._held or steps.is_pinned(names.step_dir(self.root, s)))
        doomed = retention.choose(committed, keep=self._keep, kept=kept)
        return retention.prune(self.root, doomed)

    # -- restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: State,
        step: int | None = None,
        *,
        keys: Sequence[str] | None = None,
        world_size: str = "same",
        verify: str = "full",
        on_damage: str = "raise",
    ) -> Found | None:
        """**Collective.** Put the newest committed step, or `step`, into `state` in place; None if there is none yet.

        Keys, dtypes and shapes must be the saved ones; `keys` restores only what it names ('optimizer/m' or a level
        above). `world_size="any"` reads a checkpoint of any number of ranks and any decomposition. `verify` is 'full'
        (sha256 of this rank's file, and crc32c of every piece read from others), 'quick' (crc32c) or 'none' (sizes and
        structure only). `on_damage="older"` sets a damaged newest step aside, says so, and takes the one before.

        Structure is checked before any array is touched; after CorruptShard from a digest the arrays are undefined.
        Raises NoCheckpoint, WorldSizeMismatch, LayoutMismatch, MissingShard, CorruptShard, InvalidManifest.
        """
        self.wait_until_finished()
        options = restore.Options(step, None if keys is None else tuple(keys), world_size, verify, on_damage)
        began = time.monotonic()
        opened = restore.restore(
            self._decisions, self.root, lambda _: walk(state), options, set_aside=not self._read_only
        )
        if opened is None:
            return None
        manifest = opened.manifest
        if self._decisions.rank == 0:
            restore.warn_of_differences(manifest)
        self._held = manifest.step
        self._seconds_before, self._began = manifest.wall_clock_seconds, time.monotonic()
        self._on_event({"event": "restore", "step": manifest.step, "restore_seconds": time.monotonic() - began})
        return Found(manifest.step, manifest.meta, manifest)

    def all_steps(self) -> list[int]:
        """**Collective.** The committed steps in ascending order, as rank 0 sees them."""
        return self._decisions.share(lambda: names.list_steps(self.root))

    def latest_step(self) -> int | None:
        """**Collective.** The newest committed step, or None."""
        committed = self.all_steps()
        return committed[-1] if committed else None

    def discard_after(self, step: int) -> list[int]:
        """**Collective.** Delete every committed step after `step`, the highest first; returns what is gone.

        For going back on purpose: whatever interrupts it, what is left is a beginning of the run.
        """
        self.wait_until_finished()

        def discard() -> list[int]:
            self._check_writable()
            later = [s for s in reversed(names.list_steps(self.root)) if s > step]
            return retention.prune(self.root, later)

        return self._decisions.share(discard)

    @property
    def wall_clock_seconds(self) -> float:
        """Seconds since the run began, summed over its launches."""
        return self._seconds_before + time.monotonic() - self._began

    # -- the save in flight ------------------------------------------------------------------------------------------

    @property
    def _in_flight(self) -> bool:
        return self._background is not None and self._background.busy

    def _finished(self) -> bool:
        return self._background is None or self._background.finished()

    def wait_until_finished(self) -> None:
        """**Local.** Wait for the save in flight. Raises its error, once; every rank has the same one."""
        if self._background:
            self._background.collect()

    def close(self) -> None:
        """**Collective.** Wait for the save in flight, then let go of the directory. Raises that save's error."""
        try:
            self.wait_until_finished()
        finally:
            self._release_lock()
            self._commits.close()
            self._decisions.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        # The other ranks may be anywhere, so nothing collective may start: give the writer a moment, and go.
        if self._background and not self._background.wait(_EXIT_PATIENCE):
            logger.warning("leaving with a save in flight; it may not commit")
        self._release_lock()

    def _take_lock(self) -> str:
        """Rank 0: the directory and its lock."""
        atomic.make_dir(self.root)
        launch_id = secrets.token_hex(8)
        self._lock = WriterLock(self.root, launch_id)
        return launch_id

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _check_writable(self) -> None:
        if self._read_only:
            raise CheckpointError(
                "a read-only checkpointer cannot save", path=self.root, action="Open it without read_only=True."
            )


def _check_step(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: found {step!r}, expected an int of 0 or more")
    return step


def _check_keep(keep: int | None) -> int | None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep: found {keep!r}, expected an int of 1 or more, or None for all")
    return keep


def _check_meta(meta: dict[str, Any]) -> None:
    try:
        same = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except (TypeError, ValueError) as error:
        raise UnsupportedState(f"`meta` is not plain JSON: {error}", found=repr(meta)[:200]) from error
    if not same:
        raise UnsupportedState(
            "`meta` would not come back from JSON as it is",
            found=repr(meta)[:200],
            expected="dicts with str keys, lists, str, int, float, bool and None",
            action="Put other types into the state, which keeps them.",
        )
