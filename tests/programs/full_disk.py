"""Saves more than a small filesystem takes: python -m tests.programs.full_disk MOUNT_POINT"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mpi4py import MPI

from mpi_ckpt import Checkpointer
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions
from mpi_ckpt.errors import SaveFailed
from tests.programs.states import blank, differences, state
from tests.ranks import contents, error_of

comm = MPI.COMM_WORLD


def save(ckpt: Checkpointer, step: int, extra: int = 0) -> None:
    ckpt.save(step, state(comm.rank, comm.size, step, "x", extra=extra))
    ckpt.wait_until_finished()


def fill_and_recover(root: Path, async_io: bool) -> None:
    with Checkpointer(root, comm, keep=2, async_io=async_io) as ckpt:
        save(ckpt, 1)
        free = comm.bcast(os.statvfs(root).f_bavail * os.statvfs(root).f_frsize)
        before = contents(root)

        # Far too much is refused before a byte is written, and the error names both numbers.
        error = error_of(comm, SaveFailed, lambda: save(ckpt, 2, extra=free // 8 + 1))
        assert "not enough room" in str(error)
        assert f"found {free} bytes free" in str(error)

        # The arrays would fit, but not what a file needs beside them: the last rank's write meets the end of the disk.
        error = error_of(comm, SaveFailed, lambda: save(ckpt, 2, extra=(free - 20_000) // 8))
        assert "[Errno 28]" in str(error)
        assert "/step_00000002/" in error.path
        comm.Barrier()
        assert contents(root) == before
        comm.Barrier()

        for step in (2, 3, 4):
            save(ckpt, step)
        assert ckpt.all_steps() == [3, 4]
        mine = blank(comm.rank, comm.size)
        assert ckpt.restore(mine).step == 4
        assert not differences(mine, comm.rank, comm.size)


def main() -> None:
    abort_on_uncaught_exceptions(comm)
    for name, async_io in (("sync", False), ("async", True)):
        fill_and_recover(Path(sys.argv[1]) / name, async_io)


if __name__ == "__main__":
    main()
