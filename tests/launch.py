"""Whole programs on MPI ranks: launched with a hard timeout, watched, killed, and never left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANG = 240.0  # seconds: what has not ended by then never will, on a machine many times slower than an ordinary one too


@dataclass(frozen=True)
class Outcome:
    status: int
    stdout: str
    stderr: str
    seconds: float

    def check(self) -> Outcome:
        """The outcome itself, if the program succeeded; its output is in the assertion otherwise."""
        assert self.status == 0, f"status {self.status}\n{self.stdout}\n{self.stderr}"
        return self


def mpirun() -> str:
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    found = beside or shutil.which("mpirun")
    assert found, "no mpirun: pip install '.[mpich]'"
    return found


def is_open_mpi() -> bool:
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True, check=True).stdout
    return "Open MPI" in version


class Job:
    """A running program; `wait` gives its outcome."""

    def __init__(self, command: Sequence[str], cwd: Path, env: dict[str, str], logs: Path | None = None) -> None:
        """Start it in `cwd`, its output in files there or in `logs`."""
        self._began = time.monotonic()
        self._out, self._err = ((logs or cwd) / f"job-{time.monotonic_ns()}.{kind}" for kind in ("out", "err"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def wait(self, timeout: float = HANG) -> Outcome:
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout} s: a hang\n{self.output()}") from None
        return Outcome(status, self._read(self._out), self._read(self._err), time.monotonic() - self._began)

    def output(self) -> str:
        return self._read(self._out) + self._read(self._err)

    @staticmethod
    def _read(path: Path) -> str:
        return path.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """The process ids of the Python ranks of this job, in the order of their start."""
        return sorted(pid for pid in descendants(self.process.pid) if _is_python(pid))

    def end(self) -> None:
        ranks = descendants(self.process.pid)
        for pid in [self.process.pid, *ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Launcher:
    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self._jobs: list[Job] = []

    def start(self, ranks: int, *arguments: str, env: dict[str, str] | None = None, wrap: Sequence[str] = ()) -> Job:
        """Start `python ARGUMENTS` on `ranks` ranks; `wrap` is put before each rank's python."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        command = [mpirun(), "-n", str(ranks), *wrap, sys.executable, *map(str, arguments)]
        job = Job(command, self.cwd, {**os.environ, "PYTHONPATH": path, **(env or {})})
        self._jobs.append(job)
        return job

    def __call__(
        self,
        ranks: int,
        *arguments: str,
        timeout: float = HANG,
        env: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
    ) -> Outcome:
        return self.start(ranks, *arguments, env=env, wrap=wrap).wait(timeout)

    def train(self, ranks: int, *arguments: str, timeout: float = HANG, **options) -> Outcome:
        return self(ranks, "-m", "mpi_ckpt.train", *arguments, timeout=timeout, **options)

    def end_all(self) -> None:
        for job in self._jobs:
            job.end()


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
