"""Faults on purpose, to see that a run survives them: each fires once a run, whatever restarts or rolls back.

lr-spike:STEP:FACTOR   step STEP is taken with FACTOR times its learning rate
nan:STEP:RANK          before step STEP, rank RANK's parameters turn into NaN
kill:STEP:RANK         before step STEP, rank RANK is killed by SIGKILL
hang:STEP:RANK         before step STEP, rank RANK stops and never goes on
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpi_ckpt.storage import atomic

KINDS = ("lr-spike", "nan", "kill", "hang")
MARKERS = "injected"  # directory in the run's; a file in it means that the fault of its name has fired


@dataclass(frozen=True)
class Injection:
    """One fault. `rank` for those that hit a rank, `factor` for a spike."""

    kind: str
    step: int
    rank: int | None
    factor: float
    name: str

    @classmethod
    def parse(cls, text: str) -> Injection:
        """The fault that `text` names. Raises ValueError saying what was found and expected."""
        kind, _, rest = text.partition(":")
        step, _, last = rest.partition(":")
        wrong = ValueError(
            f"found {text!r}, expected lr-spike:STEP:FACTOR, nan:STEP:RANK, kill:STEP:RANK or hang:STEP:RANK"
        )
        if kind not in KINDS or not step.isdecimal() or int(step) < 1:
            raise wrong
        name = text.replace(":", "-")
        if kind != "lr-spike":
            if not last.isdecimal():
                raise wrong
            return cls(kind, int(step), int(last), 1.0, name)
        try:
            factor = float(last)
        except ValueError:
            raise wrong from None
        if not 0 < factor < math.inf:
            raise wrong
        return cls(kind, int(step), None, factor, name)


def due(injections: Sequence[Injection], step: int) -> list[Injection]:
    """Those of `step`."""
    return [injection for injection in injections if injection.step == step]


def claim(run_dir: Path, injection: Injection) -> bool:
    """**Local**, rank 0: whether the fault is to fire now. From then on it has, durably, whatever happens next."""
    marker = run_dir / MARKERS / injection.name
    if marker.exists():
        return False
    atomic.make_dir(marker.parent)
    atomic.write_file(marker, b"")
    return True


def strike(injection: Injection, rank: int, params: np.ndarray) -> None:
    """**Local.** What the fault does to this rank before its step; `params` [P] are its parameters."""
    if injection.rank != rank:
        return
    if injection.kind == "nan":
        params.fill(np.nan)
    elif injection.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif injection.kind == "hang":
        while True:
            time.sleep(3600)
