"""Being asked to leave: by a signal, by a file, or because the time is nearly over.

Every rank notes here what it has been asked; only the boundary of a step acts on it, after all ranks have told each
other (`checks.check_replicas`), so that a signal to any one of them ends the job for all, after the same step.

Signals: the kernel's first SIGUSR1, SIGTERM or SIGINT is a request. A thread waits for them, because Python runs its
own handlers only between two instructions of the main thread, which may be stuck in a collective: so a second signal
always finds someone who ends this process, within `_GRACE` seconds, and with it the launcher ends the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from mpi_ckpt.storage import atomic

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
REASONS = ("", "SIGUSR1", "SIGTERM", "SIGINT", "halt", "time-limit")  # a request is its place in this list
HALT_FILE = "halt"

_GRACE = 2.0  # seconds that a job may still take for a checkpoint after the second signal
_LOOK_EVERY = 0.2  # seconds between two looks for the halt file: a shared file system is not asked at every step


class Signals:
    """**Local.** The signals that this process was sent since `install`; it takes them from then on."""

    def __init__(self) -> None:
        self.request = 0  # the first one, see REASONS
        self._pipe: tuple[int, int] | None = None

    def install(self) -> Signals:
        """Begin, in the main thread and before anything slow: until then a signal has its default effect."""
        read, write = self._pipe = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)  # MPI and HDF5 are not to meet EINTR
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        return self

    def retire(self) -> None:
        """The run is over: a SIGUSR1 has nothing left to ask for. At its exit Python would give it back its default
        effect, which ends the process with a status that speaks of a kill."""
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def _listen(self, read: int) -> None:
        while received := os.read(read, 1):
            number = received[0]
            if number not in SIGNALS:
                continue
            if self.request:
                time.sleep(_GRACE)
                sys.stderr.write(f"ended by a second signal, {signal.Signals(number).name}\n")
                sys.stderr.flush()
                os._exit(128 + number)
            self.request = REASONS.index(signal.Signals(number).name)


def _nothing(number: int, frame: object) -> None:
    """A handler that is not the default one: the signal's number goes to the pipe, which is all."""


class Clock:
    """**Local.** When this launch has to be over, on rank 0's clock, and how long leaving will take.

    The end is the earlier of `limit` seconds from now and the job's end from Slurm (SLURM_JOB_END_TIME, seconds since
    1970; `jobs/train.sbatch` sets it where Slurm does not). Leaving takes a step and a checkpoint, each assumed twice
    as long as the longest so far: `margin`. As long as no checkpoint has been committed, it counts as a tenth of the
    time there was, or 60 s if that is less.
    """

    def __init__(self, limit: float | None, environment: Mapping[str, str]) -> None:
        left = [limit] if limit is not None else []
        with contextlib.suppress(KeyError, ValueError):
            left.append(float(environment["SLURM_JOB_END_TIME"]) - time.time())
        self._end = time.monotonic() + min(left) if left else None
        self._unmeasured = min(60.0, max(0.0, min(left) / 10)) if left else 0.0
        self._commit = self._step = 0.0

    def committed(self, seconds: float) -> None:
        """A checkpoint took so long, from the call to its commit."""
        self._commit = max(self._commit, seconds)

    def stepped(self, seconds: float) -> None:
        """A step, with its evaluation, took so long."""
        self._step = max(self._step, seconds)

    @property
    def margin(self) -> float:
        """Seconds to keep for leaving."""
        return 2 * ((self._commit or self._unmeasured) + self._step)

    def is_up(self) -> bool:
        """Whether it is time to leave."""
        return self._end is not None and time.monotonic() + self.margin >= self._end


class Attention:
    """**Local.** Everything that may ask a rank to leave: its signals and, on rank 0, the halt file and the clock.

    A halt file counts if it appears while a launch runs: one that lies there when the launch begins is of the last
    launch and is removed, and so is one that was obeyed.
    """

    def __init__(self, signals: Signals, run_dir: Path, clock: Clock, *, leads: bool) -> None:
        self._signals, self._halt, self.clock, self._leads = signals, run_dir / HALT_FILE, clock, leads
        self._next_look = time.monotonic()
        if leads:
            self.remove_halt_file()

    def request(self) -> int:
        """What this rank has been asked, see REASONS; 0 for nothing."""
        if self._signals.request or not self._leads:
            return self._signals.request
        if self._halted():
            return REASONS.index("halt")
        return REASONS.index("time-limit") if self.clock.is_up() else 0

    def remove_halt_file(self) -> None:
        """Rank 0: so that it stops no other launch. Raises OSError."""
        atomic.remove(self._halt, missing_ok=True)

    def _halted(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_EVERY
        return self._halt.exists()
