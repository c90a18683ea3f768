"""The one public class: when to save, what to keep, where to continue."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpi_ckpt.checkpoint import commit, restore, retention, snapshot, steps
from mpi_ckpt.checkpoint.arguments import Index, check_json, check_step, plain_index
from mpi_ckpt.checkpoint.background import Background
from mpi_ckpt.checkpoint.cadence import Cadence
from mpi_ckpt.checkpoint.events import Event, forgiving
from mpi_ckpt.checkpoint.ownership import Ownership
from mpi_ckpt.checkpoint.rotation import Rotation
from mpi_ckpt.checkpoint.state import State, walk
from mpi_ckpt.comm.agreement import DEFAULT_TIMEOUT, Council
from mpi_ckpt.comm.threads import threads_may_communicate
from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

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
    None (only `save` saves). The newest `keep` steps stay (None: all), and beside them every step that `keep_every`
    divides, the `keep_best` steps with the best `best_metric` (`best_mode` 'min' or 'max'; see `metrics` of `save`),
    those with a `pinned` file in their directory, and the step restored from until a newer one is committed. With
    `async_io` a save returns as soon as the state is copied, and commits by itself; `background_nice` (0 to 19) is
    added to the nice value of the threads that write it, so that where cores are short the application's own come
    first. `timeout` is the number of seconds after which a silent rank fails a save. `on_event` is called on every rank
    with a dict, at times from another thread; what it raises is logged. A `read_only` checkpointer takes no lock and
    changes nothing.
    """

    def __init__(
        self,
        root: str | Path,
        comm: MPI.Comm,
        *,
        every: str | None = None,
        mean_time_between_failures: str = "1d",
        keep: int | None = 3,
        keep_every: int | None = None,
        best_metric: str | None = None,
        best_mode: str = "min",
        keep_best: int = 1,
        async_io: bool = True,
        background_nice: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
        on_event: Callable[[Event], None] | None = None,
        read_only: bool = False,
    ) -> None:
        """**Collective.** Make `root` and take its writer's lock. Raises DirectoryInUse; ValueError for an option."""
        self.root = Path(root)
        self._cadence = Cadence.parse(every, mean_time_between_failures)
        policy = retention.Policy(keep, keep_every, best_metric, best_mode, keep_best)
        self._on_event = forgiving(on_event)
        self._rotation = Rotation(self.root, policy, self._on_event)
        self._read_only = read_only
        # Two activities on one communicator would meet each other's messages: each has its own.
        self._decisions = Council(comm, timeout)
        self._commits = Council(comm, timeout)
        self._background = Background("mpi_ckpt commit", background_nice)
        self._async_io = async_io
        self._threads_may_communicate = threads_may_communicate()
        self._buffers = snapshot.Buffers() if async_io else None
        self._ownership = Ownership(self.root, self._decisions, read_only=read_only)
        self._began = self._last_save = time.monotonic()
        self._seconds_before = 0.0  # of the launches that this one continues
        self._cost: float | None = None  # seconds that the last save kept the application waiting
        self._calls = 0  # of collective methods, the same on all ranks whatever has failed in them
        self._closed = False

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, state: State, **options: Any) -> bool:
        """**Collective.** `save(step, state, **options)` if `every` says so; whether it did.

        Rank 0's clock decides for all. An error of the save in flight is raised here as soon as rank 0 knows of it.
        """
        self._check_open()
        due, finished = False, False
        if self._cadence.needs_clock or self._in_flight:
            elapsed = time.monotonic() - self._last_save
            mine = self._cadence.due(step, elapsed, self._cost), self._in_flight and self._background.finished()
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
        metrics: dict[str, float] | None = None,
        index: Index | None = None,
        overwrite: bool = False,
    ) -> None:
        """**Collective.** Save `state` as `step`; with `async_io` return once it is copied.

        `meta` is small JSON of the application's own; `metrics` are numbers that retention may choose by; `index` maps
        names to `(start, shape)` intervals of the flat space that the state's 1-d arrays share. Raises StepExists
        unless `overwrite`; UnsupportedState or LayoutMismatch for a state that cannot be saved; SaveFailed when nothing
        was committed, here or by the save before this one.
        """
        began = time.monotonic()
        self._begin_call()
        self.wait_until_finished()
        self._commits.start_series(self._calls)
        about = {"meta": meta or {}, "metrics": metrics or {}}
        taken, nbytes = self._stage(check_step(step), state, about, index or {}, overwrite)
        request = commit.Request(
            root=self.root,
            step=step,
            launch_id=self._ownership.launch_id,
            nbytes=nbytes,
            overwrite=overwrite,
            meta=copy.deepcopy(meta or {}),  # the caller may change its own while the save is in flight
            metrics=dict(metrics or {}),
            index=plain_index(index or {}, taken.description.arrays),
            wall_clock_seconds=self.wall_clock_seconds,
        )
        self._last_save = time.monotonic()
        if not self._async_io:
            self._commit(request, taken, began)
        elif self._threads_may_communicate:
            self._background.start(lambda: self._commit(request, taken, began))
        else:
            self._commit_later(request, taken, began)
        self._cost = time.monotonic() - began
        self._on_event({"event": "checkpoint", "step": step, "nbytes": nbytes, "stall_seconds": self._cost})

    def _stage(
        self, step: int, state: State, about: dict[str, Any], index: Index, overwrite: bool
    ) -> tuple[snapshot.Snapshot, int]:
        """**Collective.** This rank's snapshot, once all ranks' fit together, and the bytes of all."""
        taken: list[snapshot.Snapshot] = []

        def stage() -> snapshot.Description:
            self._ownership.check_writable()
            check_json(about)
            taken.append(snapshot.take(walk(state), self._decisions.rank, self._buffers))
            return taken[0].description

        def check(descriptions: list[snapshot.Description]) -> int:
            if steps.is_committed(names.step_dir(self.root, step)) and not overwrite:
                raise commit.step_exists(self.root, step)
            plain_index(index, descriptions[0].arrays)
            return snapshot.check_agreement(descriptions)

        nbytes = self._decisions.agree(stage, check)
        return taken[0], nbytes

    def _commit(self, request: commit.Request, taken: snapshot.Snapshot, began: float) -> None:
        """**Collective.** The protocol, with room made before it, and what may follow only after it."""
        self._rotation.make_room(self._commits, request.launch_id, request.step)
        self._committed(request, began, commit.commit(self._commits, request, taken))

    def _commit_later(self, request: commit.Request, taken: snapshot.Snapshot, began: float) -> None:
        """**Collective.** The same where MPI allows one thread only: this rank's file is written in the background,
        all that needs messages waits for the next call of the application."""
        self._rotation.make_room(self._commits, request.launch_id, request.step)
        place = commit.prepare(self._commits, request)

        def conclude(written: Callable[[], commit.Written]) -> None:
            self._committed(request, began, commit.finish(self._commits, request, taken, place, written))

        self._background.start(lambda: commit.write(request, taken, place), then=conclude)

    def _committed(self, request: commit.Request, began: float, write_seconds: float) -> None:
        """**Collective.** The step is durable: say so, and let go of what it replaces."""
        times = {"commit_seconds": time.monotonic() - began, "write_seconds": write_seconds}
        self._on_event({"event": "commit", "step": request.step, "nbytes": request.nbytes, **times})
        self._rotation.after_commit(self._commits, request.launch_id, request.step)

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
        self._begin_call()
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
        self._rotation.held = manifest.step
        self._seconds_before, self._began = manifest.wall_clock_seconds, time.monotonic()
        self._on_event({"event": "restore", "step": manifest.step, "restore_seconds": time.monotonic() - began})
        return Found(manifest.step, manifest.meta, manifest)

    def all_steps(self) -> list[int]:
        """**Collective.** The committed steps in ascending order, as rank 0 sees them."""
        self._begin_call()
        return self._decisions.share(lambda: names.list_steps(self.root))

    def latest_step(self) -> int | None:
        """**Collective.** The newest committed step, or None."""
        committed = self.all_steps()
        return committed[-1] if committed else None

    def discard_after(self, step: int) -> list[int]:
        """**Collective.** Delete every committed step after `step`, the highest first; returns what is gone.

        For going back on purpose: whatever interrupts it, what is left is a beginning of the run.
        """
        self._begin_call()
        self.wait_until_finished()

        def discard() -> list[int]:
            self._ownership.check_still()
            later = [s for s in reversed(names.list_steps(self.root)) if s > step]
            return retention.prune(self.root, later)

        return self._decisions.share(discard)

    @property
    def wall_clock_seconds(self) -> float:
        """Seconds since the run began, summed over its launches."""
        return self._seconds_before + time.monotonic() - self._began

    def _begin_call(self) -> None:
        self._check_open()
        self._calls += 1
        self._decisions.start_series(self._calls)

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("the checkpointer is closed", path=self.root, action="Open another one.")

    # -- the save in flight ------------------------------------------------------------------------------------------

    @property
    def _in_flight(self) -> bool:
        return self._background.busy

    def wait_until_finished(self) -> None:
        """**Collective.** Wait for the save in flight. Raises its error, once; every rank has the same one."""
        self._background.collect()

    def close(self) -> None:
        """**Collective.** Wait for the save in flight, then let go of the directory. Raises that save's error.

        Closing again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait_until_finished()
        finally:
            self._ownership.release()
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
        if not self._background.wait(_EXIT_PATIENCE):
            logger.warning("leaving with a save in flight; it may not commit")
        self._ownership.release()
        if (failure := self._background.error) is not None:
            if isinstance(error, SystemExit) and not error.code:  # an exit as if all were well must not hide it
                raise failure
            logger.error("the save in flight failed too: %s", failure)
