"""The training program with something added that happens to real jobs.

python -m tests.programs.training spin STEP RANK -- FLAGS...        a rank that spins and holds the GIL
python -m tests.programs.training freeze STEP RANK -- FLAGS...      a rank whose node stops before the decision to save
python -m tests.programs.training skew RANK SECONDS -- FLAGS...     a rank whose clocks are off
python -m tests.programs.training stages FILE -- FLAGS...           rank 0's durable operations of the last rollback
python -m tests.programs.training die RANK STAGE -- FLAGS...        SIGKILL before the first durable operation that
                                                                    begins so in this launch's second rollback
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from mpi_ckpt.checkpoint.checkpointer import Checkpointer
from mpi_ckpt.train.__main__ import main
from mpi_ckpt.train.trainer import Trainer
from tests.programs.faults import DURABLE, Operation, watched

RANK = MPI.COMM_WORLD.rank
INTENTION = "rollback.json"


def spin(step: int, rank: int) -> None:
    genuine = Trainer.gradients

    def gradients(self: Trainer):
        if rank == RANK and self.state["progress"]["step"] + 1 == step:
            collections.deque(itertools.repeat(0), maxlen=0)  # for ever, in C, without letting go of the GIL
        return genuine(self)

    Trainer.gradients = gradients


def freeze(step: int, rank: int) -> None:
    genuine = Checkpointer.due

    def due(self: Checkpointer, asked: int):
        if rank == RANK and asked == step:
            os.kill(os.getpid(), signal.SIGSTOP)
        return genuine(self, asked)

    Checkpointer.due = due


def skew(rank: int, seconds: float) -> None:
    """From step 20 on."""
    if rank != RANK:
        return
    ahead, genuine_gradients = [0.0], Trainer.gradients

    def gradients(self: Trainer):
        if self.state["progress"]["step"] + 1 == 20:
            ahead[0] = seconds
        return genuine_gradients(self)

    Trainer.gradients = gradients
    for name in ("monotonic", "time"):
        genuine = getattr(time, name)
        setattr(time, name, lambda g=genuine: g() + ahead[0])


class Rollbacks:
    """Counts the rollbacks of this process by their intentions, and what it does durably since."""

    def __init__(self, die_before: str | None) -> None:
        self.count, self.seen, self._die_before = 0, [], die_before

    @contextlib.contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        if operation.call in DURABLE:
            if str(operation) == f"fsync {INTENTION}.tmp":
                self.count, self.seen = self.count + 1, []
            if self.count:
                self.seen.append(str(operation))
            # Only rank 0 writes intentions; what the others are killed at has a name that only a rollback makes.
            within = self.count == 2 or RANK > 0
            if within and self._die_before is not None and str(operation).startswith(self._die_before):
                os.kill(os.getpid(), signal.SIGKILL)
        yield


def run() -> None:
    split = sys.argv.index("--")
    what, *arguments = sys.argv[1:split]
    flags = sys.argv[split + 1 :]
    root = Path(flags[flags.index("--run-dir") + 1]).absolute()
    flags[flags.index("--run-dir") + 1] = str(root)
    rollbacks = Rollbacks(arguments[1] if what == "die" and int(arguments[0]) == RANK else None)
    if what == "spin":
        spin(*map(int, arguments))
    elif what == "freeze":
        freeze(*map(int, arguments))
    elif what == "skew":
        skew(int(arguments[0]), float(arguments[1]))
    try:
        with watched(root, rollbacks) if what in ("die", "stages") else contextlib.nullcontext():
            main(flags)
    finally:
        if what == "stages" and RANK == 0:
            Path(arguments[0]).write_text("\n".join(rollbacks.seen))


if __name__ == "__main__":
    run()
