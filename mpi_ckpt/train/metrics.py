"""`metrics.jsonl`: one strict JSON object a line, what happened and when, for people and programs alike.

Every line has `time`, seconds since 1970 on rank 0's clock.
A step:    {"step", "loss" [nats a token], "lr" [as used], "param_norm", "grad_norm" [before clipping], "step_seconds",
            "communication_seconds" [of them in collectives on rank 0, waiting included], "tokens_per_second"}
An event:  {"event": name, "step", ...}, with `*_seconds` in seconds and `nbytes` in bytes over all ranks:

    launch      ranks, mesh, settings    a launch begins, after `step` steps; mesh: {"data", "tensor"}, ranks of each
    checkpoint  nbytes, stall_seconds    the state is copied (synchronous: committed); the stall is what training lost
    commit      nbytes, commit_seconds, write_seconds   the step is committed and durable, so long after the call; the
                                         slowest rank wrote its file in `write_seconds`
    prune                                a committed step was deleted, by retention
    upload      nbytes, sent_nbytes, upload_seconds   the step is committed in the remote tier too
    upload_failed   error                the step is not there yet: tried again with the next one
    upload_given_up                      too many steps waited: this one stays away from the remote tier
    rebuild     moved, rebuilt, encoded, weak   files that lay on other nodes, shards and parity made again,
                                         groups of ranks that still survive fewer losses than the scheme promises
    local_loss  error, fetched           the nodes alone cannot give the step back: `fetched` are the shards that came
                                         from another tier, {"shared": [...]}; if none, that tier or an older step is
                                         taken whole
    weak_redundancy scheme, tolerance, promised   once a launch: nodes share so many of a group's ranks that fewer may
                                         be lost than the scheme promises
    unprotected scheme, domains          once a launch: so few failure domains cannot protect each other at all, and a
                                         lost one takes along what is saved on nodes alone
    evaluation  eval_loss, eval_tokens, eval_seconds   on the held-out samples, nats a token
    restore     tier, restore_seconds    the state is that of `step` again, from the nodes ("local"), the run's
                                         directory ("shared") or the "remote" tier
    damage      error                    the step was found damaged, in the tier that the error names: set aside, or in
                                         the remote tier passed over
    memory      params, gradients, optimizer, resident   bytes, lists by rank; `resident` is the most so far
    rollback    target, reason, action, rollbacks, skipped   `step` was rejected ("non-finite" or "spike"), training
                                         goes on after `target`; action: "skip" or "lower-lr"; `rollbacks` so far in
                                         the run; `skipped`: all samples that it leaves out, [[first, stop), ...]
    skip        first, stop              before `step`, samples `first` to `stop` - 1 were consumed unseen
    injection   kind, rank or factor     before `step`, a fault on purpose
    hang        seconds                  no progress after `step` for so long; the launch ends. stderr says where each
                                         rank was: one that hangs keeps rank 0 waiting, which writes this
    preemption  reason                   the launch ends early, what was done is committed: "SIGUSR1", "SIGTERM",
                                         "SIGINT", "halt" or "time-limit"
    finish      reason                   the launch ends: "finished" or "stop-at"

Of repeated steps the last row counts: after a rollback, too, the steps after `target` are taken again.
Each line is one O_APPEND write, and a step's row is written before that step can
commit, so the file never knows less than the newest checkpoint. A line that a crash cut short is removed at launch.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from mpi_ckpt.errors import ExplainedError, from_os_error

FILE_NAME = "metrics.jsonl"


class MetricsFailed(ExplainedError):
    """The log cannot be written, so training stops: it must never know less than the checkpoints."""


class MetricsLog:
    """The run's log; only rank 0 has one. Writing is thread-safe: the operating system appends each line whole."""

    def __init__(self, run_dir: Path) -> None:
        """**Local.** Open the log of `run_dir` for appending, and cut what a crash has left of its last line."""
        self.path = run_dir / FILE_NAME
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        _cut_torn_line(self._descriptor)

    def write(self, row: dict[str, Any]) -> None:
        """**Local.** Append one line, whole or not at all. A number that JSON does not have becomes null.

        Raises MetricsFailed.
        """
        stamped = row | {"time": round(time.time(), 6)}
        line = json.dumps({name: _strict(value) for name, value in stamped.items()}, allow_nan=False) + "\n"
        data, end = line.encode(), os.fstat(self._descriptor).st_size
        try:
            if os.write(self._descriptor, data) < len(data):  # the disk is full, or nearly
                os.ftruncate(self._descriptor, end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise from_os_error(error, MetricsFailed, rank=0) from error

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
