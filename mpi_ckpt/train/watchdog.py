"""A rank that makes no progress ends the job, with the stacks of its threads, so that a scheduler can start it again.

Two timers run beside Python and need none of it, so that they go off also while a rank spins inside a C function and
holds the GIL: one of `faulthandler` writes the stacks to stderr; one of POSIX then calls `_exit(HUNG)`, and the
launcher ends the other ranks. A thread winds both up again as long as the main thread reports progress (`beat`). Where
that thread still runs, it ends the job between the two, by MPI_Abort: only of that do all launchers pass the status on
(hydra may report the 9 of a rank that it had to kill after an `_exit`).

In a save or restore, which may take longer than any timeout, there is no step to count: the main thread says when it
is in one (`engine`), and there progress is processor time. Whoever writes, reads or hashes uses it, and so does a rank
that waits for others, since the engine polls; one that is stuck on a dead disk uses none. Its peers do not wait for
ever either: the engine has a timeout of its own, after which it names the silent rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mpi_ckpt.comm.abort import abort
from mpi_ckpt.train import status

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOKS = 10  # at the progress in one timeout: it goes off a tenth late at most
_TO_WRITE = 1.0  # seconds between the stacks and the end
_BUSY = 0.002  # seconds of processor time a second, at least, of a process that works or polls: measured, 0.01 or more


class Watchdog:
    """**Local.** Watches this process of `comm` for `timeout` seconds without a `beat`; 0 watches nothing."""

    def __init__(self, timeout: float, comm: MPI.Comm) -> None:
        self._timeout, self._comm = timeout, comm
        self.on_hang: Callable[[float], None] | None = None  # is told of the seconds, if Python still runs then
        self._beats = 0
        self._in_engine = False
        self._closed = threading.Event()
        if timeout > 0:
            self._timer = _ExitTimer(status.HUNG)
            self._wind_up()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self) -> None:
        """Progress."""
        self._beats += 1

    @contextlib.contextmanager
    def engine(self) -> Iterator[None]:
        """Inside, progress is processor time."""
        self._in_engine = True
        try:
            yield
        finally:
            self._beats += 1
            self._in_engine = False

    def close(self) -> None:
        """Stop watching."""
        if self._timeout > 0:
            self._closed.set()
            self._thread.join()
            self._timer.set(0)
            faulthandler.cancel_dump_traceback_later()

    def _wind_up(self) -> None:
        faulthandler.dump_traceback_later(self._timeout, file=sys.stderr)
        self._timer.set(self._timeout + _TO_WRITE)

    def _watch(self) -> None:
        pause = self._timeout / _LOOKS
        seen, used, still = -1, 0.0, 0
        while not self._closed.wait(pause):
            before, used = used, time.process_time() - time.thread_time()  # of the other threads
            if self._beats != seen or (self._in_engine and used - before > _BUSY * pause):
                seen, still = self._beats, 0
                self._wind_up()
            else:
                still += 1
            if still == _LOOKS - 1:
                self._report()
            if still == _LOOKS:
                time.sleep(_TO_WRITE / 2)  # the stacks are being written
                abort(self._comm, status.HUNG)

    def _report(self) -> None:
        sys.stderr.write(
            f"[rank {self._comm.Get_rank()}] hang: no progress for {self._timeout:g} s; the stacks of its threads "
            f"follow, then the job ends with status {status.HUNG}\n"
        )
        sys.stderr.flush()
        if self.on_hang is not None:
            self.on_hang(self._timeout)


class _ExitTimer:
    """A POSIX timer whose thread, one of the C library's, calls `_exit(status)`."""

    def __init__(self, status: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        function = ctypes.cast(self._library._exit, ctypes.c_void_p).value
        event = _SigEvent(value=status, notify=_SIGEV_THREAD, function=function)
        self._id = ctypes.c_void_p()
        _check(self._library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)))

    def set(self, seconds: float) -> None:
        """Go off in so many seconds from now; 0: never."""
        whole = int(seconds)
        spec = _Itimerspec(0, 0, whole, int((seconds - whole) * 1e9))
        _check(self._library.timer_settime(self._id, 0, ctypes.byref(spec), None))


_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2  # Linux's <bits/time.h> and <bits/siginfo-consts.h>


class _SigEvent(ctypes.Structure):
    """`struct sigevent`: 64 bytes on 64-bit Linux (sigevent(3type))."""

    _fields_ = (
        ("value", ctypes.c_long),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _Itimerspec(ctypes.Structure):
    """`struct itimerspec`: the period, then the first time, each in seconds and nanoseconds."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("period", "period_ns", "value", "value_ns"))


def _check(failed: int) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), "no POSIX timer for the watchdog; --hang-timeout 0 goes without")
