"""The one public class: when to save, what to keep, where to continue."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpi_ckpt.checkpoint import commit, local_note, restore, retention, snapshot, steps
from mpi_ckpt.checkpoint.arguments import Index, check_json, check_of_use, check_step, plain_index
from mpi_ckpt.checkpoint.background import Background
from mpi_ckpt.checkpoint.cadence import Cadence
from mpi_ckpt.checkpoint.events import Event, forgiving
from mpi_ckpt.checkpoint.local import Local
from mpi_ckpt.checkpoint.local_tier import LocalOptions
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions, Template
from mpi_ckpt.checkpoint.ownership import Ownership
from mpi_ckpt.checkpoint.remote import RemoteOptions
from mpi_ckpt.checkpoint.rotation import Rotation
from mpi_ckpt.checkpoint.saving import Saving
from mpi_ckpt.checkpoint.state import State, walk
from mpi_ckpt.checkpoint.tiers import Tiers
from mpi_ckpt.checkpoint.upload import Upload
from mpi_ckpt.comm.agreement import DEFAULT_TIMEOUT, Council
from mpi_ckpt.comm.threads import threads_may_communicate
from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.object_store import ObjectStore

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

    `remote`, 's3://bucket/prefix' or 'file:///directory', is a second tier for what the first does not survive: every
    committed step is uploaded to it in the background, at `remote_bandwidth` bytes a second and rank at most (None: as
    fast as it goes), and the newest `remote_keep` stay there (None: all; those that are pinned, divided by `keep_every`
    or best in any case). A step that waits for its upload is not deleted here; at most `keep` wait beside the one on
    its way, then the oldest is given up. A failed upload fails nothing else: it is an event and a warning, and goes on
    after the next save or in the next launch. `close` waits `upload_timeout` seconds for what is left. `before_upload`
    is called on rank 0 with that tier's store before this launch first changes anything there, until it has returned
    once; what it raises (RemoteRefused, say) is a failed upload, nothing is changed then, and it is asked again with
    the next attempt. It is for what an application keeps there itself, and to refuse a place that is another's.

    `local`, a directory on every node's own disk, is a tier before `root`: every save goes there, protected by
    `redundancy` ('single', 'partner', 'xor', 'rs:k+m'; default 'xor') from the loss of nodes, and each
    `shared_every`-th save of the run (default 10) goes to `root` as well, as does the newest, at `close`; the newest
    `local_keep` steps (default 2) stay on the nodes. What fails together, a failure domain, is the node, unless
    `domain` (a name, another one on each rank perhaps) or $MPI_CKPT_DOMAIN says otherwise, where "{rank}" stands for
    the rank; in `local`, "{domain}" stands for the domain. Where the ranks run in too few of them to protect each
    other, saves go on unprotected, with a warning and an event. A restore makes again what lost nodes held, or says why
    it cannot, and takes the newest step of any tier that it can.
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
        remote: str | None = None,
        remote_keep: int | None = None,
        remote_bandwidth: float | None = None,
        upload_timeout: float = 600.0,
        before_upload: Callable[[ObjectStore], None] | None = None,
        local: str | Path | None = None,
        redundancy: str | None = None,
        local_keep: int | None = None,
        shared_every: int | None = None,
        domain: str | None = None,
    ) -> None:
        """**Collective.** Make `root` and take its writer's lock.

        Raises DirectoryInUse; RemoteRefused for a remote tier that cannot be used; ValueError for an option.
        """
        self.root = Path(root)
        nodes = LocalOptions.of(
            local, redundancy=redundancy, local_keep=local_keep, shared_every=shared_every, domain=domain
        )
        uploading = {"remote_keep": remote_keep, "remote_bandwidth": remote_bandwidth, "before_upload": before_upload}
        check_of_use("remote", remote, **uploading)
        if nodes is not None and read_only:
            raise ValueError("local: a read_only checkpointer sees the shared and the remote tier only")
        self._cadence = Cadence.parse(every, mean_time_between_failures)
        policy = retention.Policy(keep, keep_every, best_metric, best_mode, keep_best)
        self._on_event = forgiving(on_event)
        self._read_only = read_only
        self.upload_timeout = upload_timeout  # may be changed, by all ranks, up to `close`
        self._tiers = Tiers(self.root, remote)
        self._upload: Upload | None = None
        if not upload_timeout >= 0:
            raise ValueError(f"upload_timeout: found {upload_timeout!r}, expected seconds")
        if remote is not None:
            options = RemoteOptions(remote, policy, remote_keep, remote_bandwidth, background_nice, before_upload)
            self._upload = Upload(self.root, comm, options, timeout) if not read_only else None
        waiting = self._upload.waiting if self._upload else frozenset
        self._rotation = Rotation(self.root, policy, self._on_event, waiting)
        # Two activities on one communicator would meet each other's messages: each has its own.
        self._decisions = Council(comm, timeout)
        self._commits = Council(comm, timeout)
        self._background = Background("mpi_ckpt commit", background_nice)
        self._async_io = async_io
        self._threads_may_communicate = threads_may_communicate()
        self._buffers = snapshot.Buffers() if async_io else None
        self._ownership = Ownership(self.root, self._decisions, read_only=read_only)
        self._local: Local | None = None
        if nodes is not None:
            try:
                self._local = Local(self._decisions, nodes, self.root, self._ownership.launch_id, self._on_event)
            except BaseException:
                self._ownership.release()
                raise
        self._saving = Saving(self._commits, self._rotation, self._local, self._upload, self._on_event)
        if self._upload is not None:
            self._upload.start(self._ownership.launch_id, self._on_event)
        self._began = self._last_save = time.monotonic()
        self._seconds_before = 0.0  # of the launches that this one continues
        self._cost: float | None = None  # seconds that the last save kept the application waiting
        self._calls = 0  # of collective methods, the same on all ranks whatever has failed in them
        self._closed = False

    # -- saving ------------------------------------------------------------------------------------------------------

    def save_if_due(self, step: int, state: State, **options: Any) -> bool:
        """**Collective.** `save(step, state, **options)` if it is `due`; whether it was."""
        due = self.due(step)
        if due:
            self.save(step, state, **options)
        return due

    def due(self, step: int) -> bool:
        """**Collective.** Whether `every` says that `step` is to be saved. Rank 0's clock decides for all.

        An error of the save in flight is raised here as soon as rank 0 knows of it.
        """
        self._check_open()
        if not (self._cadence.needs_clock or self._in_flight):
            return self._cadence.due(step, 0.0, None)
        elapsed = time.monotonic() - self._last_save
        mine = self._cadence.due(step, elapsed, self._cost), self._in_flight and self._background.finished()
        due, finished = self._decisions.broadcast(mine)
        if finished:
            self.wait_until_finished()
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
        shared: bool = False,
    ) -> None:
        """**Collective.** Save `state` as `step`; with `async_io` return once it is copied.

        `meta` is small JSON of the application's own; `metrics` are numbers that retention may choose by; `index` maps
        names to `(start, shape)` intervals of the flat space that the state's 1-d arrays share. `shared` saves to the
        shared tier too, whatever `shared_every` says: for a step that must outlive the nodes. Raises StepExists
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
            shared=shared,
            save_count=self._local.saves + 1 if self._local else 0,
        )
        self._last_save = time.monotonic()
        if not self._async_io:
            self._saving.commit(request, taken, began)
        elif self._threads_may_communicate:
            self._background.start(lambda: self._saving.commit(request, taken, began))
        else:
            self._saving.commit_later(request, taken, began, self._background)
        self._cost = time.monotonic() - began
        self._on_event({"event": "checkpoint", "step": step, "nbytes": nbytes, "stall_seconds": self._cost})

    def _stage(
        self, step: int, state: State, about: dict[str, Any], index: Index, overwrite: bool
    ) -> tuple[snapshot.Snapshot, int]:
        """**Collective.** This rank's snapshot, once all ranks' fit together, and the bytes of all."""
        taken: list[snapshot.Snapshot] = []

        def stage() -> snapshot.Description:
            self._ownership.check_writable()
            if self._local is not None:
                self._local.check_new(step, overwrite)
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

        With a remote tier the newest step of both counts, and each shard is read where it is nearest and intact.

        Structure is checked before any array is touched; after CorruptShard from a digest the arrays are undefined.
        Raises NoCheckpoint, WorldSizeMismatch, LayoutMismatch, MissingShard, CorruptShard, InvalidManifest,
        RemoteFailed.
        """
        self._begin_call()
        self.wait_until_finished()
        options = RestoreOptions(step, None if keys is None else tuple(keys), world_size, verify, on_damage)
        began = time.monotonic()
        opened = self._opened(lambda _: walk(state), options)
        if opened is None:
            return None
        manifest = opened.manifest
        if self._decisions.rank == 0:
            restore.warn_of_differences(manifest)
        self._rotation.held = manifest.step
        self._seconds_before, self._began = manifest.wall_clock_seconds, time.monotonic()
        about = {"tier": opened.copies.tier, "restore_seconds": time.monotonic() - began}
        self._on_event({"event": "restore", "step": manifest.step, **about})
        return Found(manifest.step, manifest.meta, manifest)

    def _opened(self, template: Template, options: RestoreOptions) -> Opened | None:
        """**Collective.** The step that was found and put into the leaves, from whichever tier."""
        if self._local is not None:
            return self._local.restore(self._decisions, self._tiers, template, options)
        opened = restore.restore(
            self._decisions,
            self._tiers,
            template,
            options,
            set_aside=not self._read_only,
            on_event=self._on_event,
        )
        if options.step is None:
            found = None if opened is None else opened.manifest.step
            local_note.tell_of_unseen(self._decisions, self.root, (), found, (), self._on_event)
        return opened

    def all_steps(self) -> list[int]:
        """**Collective.** The committed steps of all tiers, ascending; beyond the nodes, as rank 0 sees them."""
        self._begin_call()
        near = self._local.steps(self._decisions) if self._local else []
        return sorted({*near, *self._decisions.share(self._tiers.list_steps)})

    def latest_step(self) -> int | None:
        """**Collective.** The newest committed step, or None."""
        committed = self.all_steps()
        return committed[-1] if committed else None

    def discard_after(self, step: int) -> list[int]:
        """**Collective.** Delete every committed step after `step`, the highest first; returns what is gone here.

        For going back on purpose, so pinned steps go too: whatever interrupts it, what is left is a beginning of the
        run. Raises CheckpointError for a step that cannot be deleted. They go from the remote tier first; raises
        RemoteFailed, with nothing changed here, where that cannot be.
        """
        self._begin_call()
        self.wait_until_finished()

        def discard() -> list[int]:
            self._ownership.check_still()
            with self._upload.discarding_after(step) if self._upload else contextlib.nullcontext():
                later = [s for s in reversed(names.list_steps(self.root)) if s > step]
                for found in later:
                    if not retention.prune(self.root, [found]):
                        raise CheckpointError(
                            f"step {found} cannot be deleted, and a restart would take it",
                            path=names.step_dir(self.root, found),
                            action="See why (the log says), delete it, and go back again.",
                        )
            return later

        gone = self._decisions.share(discard)
        if self._local is not None:
            gone = sorted({*gone, *self._local.discard_after(self._decisions, step)}, reverse=True)
        return gone

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

        With `local`, a newest step that is on the nodes alone is copied to `root`: raises SaveFailed, CorruptShard or
        MissingShard where that cannot be. Uploads have `upload_timeout` seconds to end, and raise nothing. Closing
        again does nothing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait_until_finished()
            self._commits.start_series(self._calls + 1)
            self._saving.share_newest(self.root, self._ownership.launch_id)
        finally:
            if self._upload is not None:
                self._upload.close(self.upload_timeout)
            self._release()
            self._commits.close()
            self._decisions.close()

    def _release(self) -> None:
        self._ownership.release()
        if self._local is not None:
            self._local.release()

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
        if self._upload is not None:
            self._upload.abandon()
        self._release()
        if (failure := self._background.error) is not None:
            if isinstance(error, SystemExit) and not error.code:  # an exit as if all were well must not hide it
                raise failure
            logger.error("the save in flight failed too: %s", failure)
