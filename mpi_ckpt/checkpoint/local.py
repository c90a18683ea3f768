"""What a checkpointer does with its node-local tier: save, restore, list and discard, and count the run's saves.

Every save goes to the nodes, so that they always have the newest step, whole or to be made whole. Each
`shared_every`-th goes to the shared tier *as well*, not instead: so the loss of a node never costs more than the time
since the last save, and a loss beyond the scheme that since the last `shared_every` saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from mpi_ckpt.checkpoint import local_commit, local_note, local_rotation, local_share, steps
from mpi_ckpt.checkpoint.commit import Request, Written, step_exists
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local_commit import Prepared
from mpi_ckpt.checkpoint.local_restore import Restoring, restore_nearest
from mpi_ckpt.checkpoint.local_tier import LocalOptions, LocalTier
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions, Template
from mpi_ckpt.checkpoint.snapshot import Snapshot
from mpi_ckpt.checkpoint.tiers import Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, CorruptShard, MissingShard, SaveFailed
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest


class Local:
    """The node-local tier of one launch. `saves`: those of the run that have committed so far, over its launches."""

    def __init__(
        self, council: Council, options: LocalOptions, root: Path, launch_id: str, on_event: Callable[[Event], None]
    ) -> None:
        """**Collective.** See LocalTier. `root` is the shared tier's."""
        self._tier = LocalTier(council, options, launch_id)
        self._root = root
        self._on_event = on_event
        self._weakness_told = False
        self._held: int | None = None  # the step restored from, until a newer one is committed
        self._used = False  # whether anything was restored or saved
        self.saves = max((copy.save_count for copy, _ in self._tier.agree(council).latest.values()), default=0)

    def release(self) -> None:
        """**Local.** Let the next launch in; again does nothing."""
        self._tier.release()

    def check_new(self, step: int, overwrite: bool) -> None:
        """**Local.** Raise StepExists where this node has the step."""
        if self._tier.leads and not overwrite and steps.is_committed(self._tier.directory(step)):
            raise step_exists(self._tier.root, step)

    def prepare(self, council: Council, request: Request, snapshot: Snapshot) -> Prepared:
        """**Collective.** See local_commit."""
        return local_commit.prepare(council, self._tier, request, snapshot)

    def finish(self, council: Council, snapshot: Snapshot, prepared: Prepared, written: Callable[[], Written]) -> float:
        """**Collective.** Commit on all nodes; see local_commit."""
        return local_commit.finish(council, self._tier, snapshot, prepared, written)

    def after_commit(self, council: Council, request: Request) -> None:
        """**Collective.** Count the save, which is reported by now, and delete from the nodes what it pushes out."""
        self.saves, self._used = request.save_count, True
        self._note(council, request.step)
        self._tell_of_weakness(request.step)
        if self._held is not None and request.step > self._held:
            self._held = None
        spared = {request.step} if self._held is None else {request.step, self._held}
        local_rotation.rotate(council, self._tier, self._on_event, spared)

    def _note(self, council: Council, step: int | None) -> None:
        """**Local.** On rank 0: the newest step on the nodes."""
        if council.rank == 0:
            local_note.write(self._root, None if step is None else local_note.Note(step, self._tier.domains))

    def _tell_of_weakness(self, step: int) -> None:
        """**Local.** With the first save of a launch that survives fewer losses than were asked for."""
        wanted, tolerance = self._tier.wanted, self._tier.tolerance
        if tolerance == wanted.tolerance or self._weakness_told:
            return
        self._weakness_told = True
        about: Event = {"step": step, "scheme": str(wanted)}
        if tolerance:
            about |= {"event": "weak_redundancy", "tolerance": tolerance, "promised": wanted.tolerance}
        else:
            about |= {"event": "unprotected", "domains": len(self._tier.domains)}
        self._on_event(about)

    def goes_further(self, request: Request) -> bool:
        """Whether this save is one for the shared tier as well."""
        # What is saved again may lie in the shared tier, where the old one must not outlive the new.
        return request.shared or request.overwrite or request.save_count % self._tier.shared_every == 0

    def newest_unshared(self, council: Council) -> ShardManifest | None:
        """**Collective.** The newest step's manifest, where the shared tier has none so new; None for a launch that has
        neither restored nor saved any."""
        if not self._used:
            return None
        return local_share.newest_unshared(council, self._tier, lambda: names.list_steps(self._root))

    def share(self, council: Council, request: Request, manifest: ShardManifest) -> float:
        """**Collective.** Commit that step in the shared tier too; see local_share."""
        return local_share.share(council, self._tier, request, manifest, self._on_event)

    @contextlib.contextmanager
    def naming_what_is_there(self, step: int) -> Iterator[None]:
        """A save that fails in the shared tier stays on the nodes: the error says so."""
        try:
            yield
        except (SaveFailed, CorruptShard, MissingShard) as error:
            error.what = f"step {step} is on the nodes, but not in the shared tier: {error.what}"
            raise

    def restore(self, council: Council, tiers: Tiers, template: Template, options: RestoreOptions) -> Opened | None:
        """**Collective.** See local_restore, and local_note."""
        seen = self.steps(council)
        opened = restore_nearest(Restoring(council, self._tier, tiers, template, options, self._on_event))
        if options.step is None:
            found = None if opened is None else opened.manifest.step
            local_note.tell_of_unseen(council, self._root, seen, found, self._tier.domains, self._on_event)
            self._note(council, found)
        if opened is not None:  # a run whose nodes are all new counts on from the shared tier
            self.saves = max(self.saves, opened.manifest.save_count)
            self._held, self._used = opened.manifest.step, True
        return opened

    def steps(self, council: Council) -> list[int]:
        """**Collective.** The steps that are committed on the nodes, ascending."""
        found = self._tier.agree(council)
        return sorted({*found.latest, *found.damaged})

    def discard_after(self, council: Council, step: int) -> list[int]:
        """**Collective.** Delete later steps from the nodes, the highest first; those that are gone: all of them.

        Raises CheckpointError for a step that a node cannot delete.
        """
        there = self.steps(council)
        later = [found for found in reversed(there) if found > step]
        self._note(council, max((found for found in there if found <= step), default=None))
        gone = local_rotation.delete(council, self._tier, later) if later else []
        council.share(lambda: self._check_gone(later, gone))
        return gone

    def _check_gone(self, later: list[int], gone: list[int]) -> None:
        if stuck := [step for step in later if step not in gone]:
            raise CheckpointError(
                f"step {stuck[0]} cannot be deleted from every node, and a restart would take it",
                path=self._tier.directory(stuck[0]),
                found=f"steps {', '.join(map(str, stuck))} still on some node",
                action="See which node and why (its log says), delete it there, and go back again.",
            )
