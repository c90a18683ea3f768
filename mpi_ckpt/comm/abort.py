"""How a program leaves MPI when something went wrong: never one rank alone, never a hang."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import sys
import termios
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from mpi4py import MPI

_PATIENCE = 3.0  # seconds that ranks which leave together wait for each other
_PAUSE = 0.01
_HEARING = 1.0  # seconds that a launcher has to read what this rank has said


def abort(comm: MPI.Comm, status: int) -> NoReturn:
    """**Local.** End every rank of the job now, with `status`.

    MPICH's MPI_Abort returns for some milliseconds; nothing may run after it, so the process ends itself too.
    """
    for stream in (sys.stdout, sys.stderr):
        _let_be_read(stream)
    comm.Abort(status)
    os._exit(status)


def _let_be_read(stream: TextIO) -> None:
    """Flush, and wait until whoever reads the pipe has emptied it: a launcher that is told to end all may drop it."""
    deadline = time.monotonic() + _HEARING
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, a reader that is gone
        stream.flush()
        while stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) and time.monotonic() < deadline:
            (unread,) = struct.unpack("i", fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)))
            time.sleep(_PAUSE)  # once after it is empty, too: to be passed on
            if not unread:
                return


def abort_on_uncaught_exceptions(comm: MPI.Comm) -> None:
    """**Local.** From now on an exception that nobody caught prints its traceback and ends the whole job.

    Without it, the other ranks would wait for ever for the one that is gone. Status 130 for Ctrl-C, else 1.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        # In one write: the same error may have reached another rank, whose abort would cut this one short.
        print(f"[rank {comm.rank}] uncaught exception, ending the job:\n{text}", end="", file=sys.stderr, flush=True)
        abort(comm, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def leave_together(comm: MPI.Comm, status: int) -> NoReturn:
    """**Collective.** Leave with `status`, as all ranks are about to; if one does not come, end the job for all."""
    request = comm.Ibarrier()
    deadline = time.monotonic() + _PATIENCE
    while not request.Test():
        if time.monotonic() >= deadline:
            abort(comm, status)
        time.sleep(_PAUSE)
    raise SystemExit(status)
