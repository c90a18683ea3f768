"""One writer a directory: `writer.lock` holds a lock of the operating system and the name of the launch that took it.

The lock (flock) ends with the process that took it, so a crash leaves nothing to clean up. The name is for what flock
cannot see: ranks of an old launch that are still running after a requeue, and filesystems that lock nothing. Whoever is
about to publish a file first asks whether the name is still his.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from mpi_ckpt.errors import DirectoryInUse
from mpi_ckpt.storage import atomic
from mpi_ckpt.storage.names import LOCK

logger = logging.getLogger(__name__)

_PATIENCE = 3.0  # seconds: a killed launch needs a moment until its last rank is gone
_PAUSE = 0.05
_NOT_SUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class WriterLock:
    """The lock on `root`, taken by the one process that decides for its launch."""

    def __init__(self, root: Path, launch_id: str) -> None:
        """**Local.** Take the lock and write `launch_id` into it. Raises DirectoryInUse when another launch has it."""
        self.path = root / LOCK
        self._launch_id = launch_id
        owner = {
            "launch": launch_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        with contextlib.ExitStack() as stack:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, self._descriptor)
            self._lock()
            with atomic.naming(self.path):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)
            stack.pop_all()  # taken: the descriptor stays open until `release`

    def release(self) -> None:
        """**Local.** Let the next launch in. The file stays: removing it would race with whoever opens it now."""
        if read_owner(self.path.parent).get("launch") == self._launch_id:  # else a successor's name is in it
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _lock(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NOT_SUPPORTED:
                    logger.warning("%s: no locks on this filesystem (%s); keep to one writer", self.path, error)
                    return None
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    error.filename = str(self.path)
                    raise
            if time.monotonic() >= deadline:
                raise DirectoryInUse(
                    "another launch writes to this checkpoint directory",
                    path=self.path,
                    found=describe_owner(read_owner(self.path.parent)),
                    expected="no other writer",
                    action="End that launch, or give this one another directory.",
                )
            time.sleep(_PAUSE)


def read_owner(root: Path) -> dict[str, Any]:
    """**Local.** What the lock file says of its owner; empty when there is none."""
    try:
        owner = json.loads((root / LOCK).read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def check_owner(root: Path, launch_id: str) -> None:
    """**Local.** Raise DirectoryInUse unless `launch_id` is still the one that the lock names."""
    owner = read_owner(root)
    if owner.get("launch") != launch_id:
        raise DirectoryInUse(
            "this launch no longer owns the checkpoint directory, so it must not commit",
            path=root / LOCK,
            found=describe_owner(owner),
            expected=f"launch {launch_id}",
            action="Another launch took over; end this one.",
        )


def describe_owner(owner: dict[str, Any]) -> str:
    """The owner in words."""
    if not owner:
        return "no owner named"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return (
        f"launch {owner.get('launch')} (pid {owner.get('pid')} on {owner.get('host')}{job}, since {owner.get('since')})"
    )
