"""A save from its snapshot to the tiers that it is for, with all that may come before and has to come after."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mpi_ckpt.checkpoint import commit, local_commit
from mpi_ckpt.checkpoint.background import Background
from mpi_ckpt.checkpoint.commit import Request, Written
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local import Local
from mpi_ckpt.checkpoint.rotation import Rotation
from mpi_ckpt.checkpoint.snapshot import Snapshot
from mpi_ckpt.checkpoint.upload import Upload
from mpi_ckpt.comm.agreement import Council


@dataclass(frozen=True)
class Saving:
    """What takes part in the saves of a checkpointer; `began` is the time.monotonic() at which one was asked for.

    The council's messages are those of saves alone.
    """

    council: Council
    rotation: Rotation
    local: Local | None
    upload: Upload | None
    on_event: Callable[[Event], None]

    def commit(self, request: Request, taken: Snapshot, began: float) -> None:
        """**Collective.** The protocol, with room made before it, and what may follow only after it."""
        if self.local is None:
            self._commit_shared(request, taken, began)
            return
        prepared = self.local.prepare(self.council, request, taken)
        with local_commit.writing(prepared) as written:
            self._conclude(self.local, request, taken, began, prepared, written)

    def _commit_shared(self, request: Request, taken: Snapshot, began: float) -> None:
        self.rotation.make_room(self.council, request.launch_id, request.step)
        self._committed(request, began, commit.commit(self.council, request, taken))

    def _conclude(
        self,
        local: Local,
        request: Request,
        taken: Snapshot,
        began: float,
        prepared: local_commit.Prepared,
        written: Callable[[], Written],
    ) -> None:
        """**Collective.** Commit on the nodes, and then in `root` as well, if it is its turn."""
        seconds = local.finish(self.council, taken, prepared, written)
        if local.goes_further(request):
            with local.naming_what_is_there(request.step):
                self._commit_shared(replace(request, save_id=prepared.place.attributes.save_id), taken, began)
        else:
            self._report(request, began, seconds, "local")
        local.after_commit(self.council, request)

    def share_newest(self, root: Path, launch_id: str) -> None:
        """**Collective.** At the end: what this launch restored or saved does not stay on the nodes alone."""
        if self.local is None:
            return
        began, manifest = time.monotonic(), self.local.newest_unshared(self.council)
        if manifest is None:
            return
        nbytes = sum(shard.nbytes for shard in manifest.shards)
        request = Request(root, manifest.step, launch_id, nbytes, save_id=manifest.save_id)
        with self.local.naming_what_is_there(request.step):
            self.rotation.make_room(self.council, launch_id, request.step)
            self._committed(request, began, self.local.share(self.council, request, manifest))

    def commit_later(self, request: Request, taken: Snapshot, began: float, background: Background) -> None:
        """**Collective.** The same where MPI allows one thread only: this rank's file is written in the background,
        all that needs messages waits for the next call of the application."""
        if (local := self.local) is not None:
            on_nodes = local.prepare(self.council, request, taken)
            background.start(
                lambda: local_commit.write(on_nodes),
                then=lambda written: self._conclude(local, request, taken, began, on_nodes, written),
            )
            return
        self.rotation.make_room(self.council, request.launch_id, request.step)
        place = commit.prepare(self.council, request)

        def conclude(written: Callable[[], Written]) -> None:
            self._committed(request, began, commit.finish(self.council, request, taken, place, written))

        background.start(lambda: commit.write(request, taken, place), then=conclude)

    def _committed(self, request: Request, began: float, write_seconds: float) -> None:
        """**Collective.** The step is durable: say so, and let go of what it replaces."""
        self._report(request, began, write_seconds, "shared")
        if self.upload is not None:
            self.upload.add(request.step)
        self.rotation.after_commit(self.council, request.launch_id, request.step)

    def _report(self, request: Request, began: float, write_seconds: float, tier: str) -> None:
        times = {"commit_seconds": time.monotonic() - began, "write_seconds": write_seconds}
        where = {"tier": tier} if self.local is not None else {}
        self.on_event({"event": "commit", "step": request.step, "nbytes": request.nbytes, **times, **where})
