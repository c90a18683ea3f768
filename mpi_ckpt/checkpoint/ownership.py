"""Who may write to a directory of checkpoints: one launch, by the lock that its rank 0 holds."""

from __future__ import annotations

import secrets
from pathlib import Path

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import atomic, lock
from mpi_ckpt.storage.lock import WriterLock


class Ownership:
    """This launch's right to write below `root`; `launch_id` is the name that the lock carries, the same on all ranks.

    A `read_only` one takes no lock, makes nothing, and owns nothing.
    """

    def __init__(self, root: Path, council: Council, *, read_only: bool = False) -> None:
        """**Collective.** Make `root`, take its writer's lock. Raises DirectoryInUse when another launch has it."""
        self._root = root
        self._read_only = read_only
        self._lock: WriterLock | None = None
        self.launch_id = "" if read_only else council.share(self._take)

    def _take(self) -> str:
        """Rank 0: the directory and its lock, and an end to what an overwrite that crashed left in it."""
        atomic.make_dir(self._root)
        launch_id = secrets.token_hex(8)
        self._lock = WriterLock(self._root, launch_id)
        steps.clean_committed(self._root)
        return launch_id

    def check_writable(self) -> None:
        """**Local.** Raise CheckpointError if this is a reader."""
        if self._read_only:
            raise CheckpointError(
                "a read-only checkpointer cannot write", path=self._root, action="Open it without read_only=True."
            )

    def check_still(self) -> None:
        """**Local.** Raise DirectoryInUse when another launch has taken over, CheckpointError if this is a reader."""
        self.check_writable()
        lock.check_owner(self._root, self.launch_id)

    def release(self) -> None:
        """**Local.** Let the next launch in; again does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
