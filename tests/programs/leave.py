"""Leaves with a save in flight: python -m tests.programs.leave ROOT HOW [RANK]

Step 1 is committed; the save of step 2 has returned, and is held up for SLOW seconds (0.5) by the last rank's disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from mpi_ckpt import Checkpointer
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions
from tests.programs.faults import Fault, Operation, watched
from tests.programs.states import state

SLOW = float(os.environ.get("SLOW", 0.5))

comm = MPI.COMM_WORLD


@contextlib.contextmanager
def slow(operation: Operation) -> Iterator[None]:
    if operation.call == "fsync" and operation.path.startswith("step_00000002/") and comm.rank == comm.size - 1:
        time.sleep(SLOW)
    yield


def save_two(ckpt: Checkpointer) -> None:
    for step in (1, 2):
        ckpt.wait_until_finished()
        ckpt.save(step, state(comm.rank, comm.size, step, "x"))


def close(root: Path, rank: int) -> None:
    """As one should."""
    with Checkpointer(root, comm) as ckpt:
        save_two(ckpt)


def kill(root: Path, rank: int) -> None:
    """One rank is killed as soon as the save has returned; the others wait for it."""
    with Checkpointer(root, comm) as ckpt:
        save_two(ckpt)
        if comm.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.Barrier()


def throw(root: Path, rank: int) -> None:
    """One rank raises; the others wait for it in a collective of the application."""
    with Checkpointer(root, comm) as ckpt:
        save_two(ckpt)
        if comm.rank == rank:
            raise RuntimeError(f"rank {rank} has had enough")
        comm.Barrier()


def throw_before(root: Path, rank: int) -> None:
    """One rank raises before a save which the others have begun."""
    with Checkpointer(root, comm) as ckpt:
        if comm.rank == rank:
            raise RuntimeError(f"rank {rank} has had enough")
        save_two(ckpt)


def exit_inside(root: Path, rank: int) -> None:
    with Checkpointer(root, comm) as ckpt:
        save_two(ckpt)
        sys.exit(0)


def exit_plainly(root: Path, rank: int) -> None:
    save_two(Checkpointer(root, comm))
    sys.exit(0)


def fall_off(root: Path, rank: int) -> None:
    ckpt = Checkpointer(root, comm)
    save_two(ckpt)


def fail(root: Path, rank: int) -> None:
    """The save of step 2 fails, and nothing comes after it."""
    fault = Fault("fsync", "step_00000002/*.tmp", errno.EIO)
    with contextlib.ExitStack() as stack:
        if comm.rank == rank:
            stack.enter_context(watched(root, fault))
        with Checkpointer(root, comm) as ckpt:
            save_two(ckpt)


def fail_and_exit(root: Path, rank: int) -> None:
    """The save of step 2 fails, and the application leaves as if all were well."""
    fault = Fault("fsync", "step_00000002/*.tmp", errno.EIO)
    with contextlib.ExitStack() as stack:
        if comm.rank == rank:
            stack.enter_context(watched(root, fault))
        with Checkpointer(root, comm) as ckpt:
            save_two(ckpt)
            sys.exit(0)


def main() -> None:
    logging.basicConfig()
    abort_on_uncaught_exceptions(comm)
    root, how, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0
    if how not in ("fail", "fail_and_exit"):
        watching = watched(root, slow)
        watching.__enter__()  # for the rest of the process
    globals()[how](root, rank)


if __name__ == "__main__":
    main()
