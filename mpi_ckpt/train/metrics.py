"""`metrics.jsonl`: one strict JSON object a line, what happened and when, for people and programs alike.

Every line has `time`, seconds since 1970 on rank 0's clock.
A step:    {"step", "loss" [nats a token], "lr", "param_norm", "grad_norm", "step_seconds", "tokens_per_second"}
An event:  {"event": name, "step", ...}, with `*_seconds` in seconds and `nbytes` in bytes over all ranks:

    launch      ranks, settings          a launch begins, after `step` steps
    checkpoint  nbytes, stall_seconds    the state is copied (synchronous: committed); the stall is what training lost
    commit      nbytes, commit_seconds   the step is committed and durable
    prune                                a committed step was deleted, by retention
    restore     restore_seconds          training continues after `step`
    damage      error                    the step was found damaged and set aside
    finish      reason                   the launch ends: "finished" or "stop-at"

Of repeated steps the last row counts. Each line is one O_APPEND write, and a step's row is written before that step can
commit, so the file never knows less than the newest checkpoint. A line that a crash cut short is removed at launch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsLog:
    """The run's log; only rank 0 has one. Writing is thread-safe: the operating system appends each line whole."""

    def __init__(self, run_dir: Path) -> None:
        """**Local.** Open the log of `run_dir` for appending, and cut what a crash has left of its last line."""
        self.path = run_dir / FILE_NAME
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        _cut_torn_line(self._descriptor)

    def write(self, row: dict[str, Any]) -> None:
        """**Local.** Append one line. A number that JSON does not have becomes null. Raises OSError."""
        stamped = row | {"time": round(time.time(), 6)}
        line = json.dumps({name: _strict(value) for name, value in stamped.items()}, allow_nan=False) + "\n"
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """**Local.** Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _strict(value: Any) -> Any:
    return None if isinstance(value, float) and value - value != 0 else value


def _cut_torn_line(descriptor: int) -> None:
    """Truncate after the last newline, reading backwards."""
    end = os.fstat(descriptor).st_size
    position = end
    while position > 0:
        start = max(0, position - 4096)
        newline = os.pread(descriptor, position - start, start).rfind(b"\n")
        if newline >= 0:
            position = start + newline + 1
            break
        position = start
    if position < end:
        os.ftruncate(descriptor, position)
