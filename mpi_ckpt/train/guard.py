"""The divergence guard: what it remembers, and its decisions. Pure: the same numbers give the same on every rank.

A step is rejected before it changes the model: when its loss or gradient is not finite, or when its loss is a *spike*,
more than `factor` times the median of the last WINDOW accepted losses and at least MARGIN above it (with fewer than
FEWEST accepted losses nothing is called a spike). The parameters are looked at once more after the update.

What the guard remembers is part of every checkpoint, under "guard" in its `meta`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mpi_ckpt.errors import ExplainedError

WINDOW, FEWEST, MARGIN = 20, 5, 0.5
# AdamW squares a gradient in float32. No element is longer than the norm: below this, no square overflows.
LARGEST_NORM = math.sqrt(3.4028234663852886e38)

Interval = tuple[int, int]


class Diverged(ExplainedError):
    """Training diverged, and going back is not allowed, or not any more."""


@dataclass
class Guard:
    """What it remembers."""

    losses: list[float] = field(default_factory=list)  # the last accepted ones
    skip: list[Interval] = field(default_factory=list)  # samples never to be trained on: sorted, disjoint [first, stop)
    rollbacks: int = 0  # of the run so far
    target: int | None = None  # the step that the last rollback went to

    def judge(self, loss: float, grad_norm: float, factor: float) -> str | None:
        """Why a step is to be rejected: "non-finite" or "spike"; None to accept it."""
        if not (math.isfinite(loss) and grad_norm < LARGEST_NORM):
            return "non-finite"
        if len(self.losses) < FEWEST:
            return None
        usual = median(self.losses)
        return "spike" if loss > factor * usual and loss > usual + MARGIN else None

    def accept(self, loss: float) -> None:
        """The step was taken."""
        self.losses = [*self.losses, loss][-WINDOW:]

    def next_cursor(self, cursor: int) -> int:
        """Where the next batch begins: behind the interval to be skipped in which `cursor` lies."""
        return next((stop for first, stop in self.skip if first <= cursor < stop), cursor)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        skip = [list(interval) for interval in self.skip]
        return {"losses": self.losses, "skip": skip, "rollbacks": self.rollbacks, "target": self.target}

    @classmethod
    def from_json(cls, stored: dict[str, Any] | None) -> Guard:
        """The inverse; a checkpoint older than the guard has None. Raises TypeError or KeyError for anything else."""
        if stored is None:
            return cls()
        skip = [(int(first), int(stop)) for first, stop in stored["skip"]]
        return cls(list(stored["losses"]), skip, stored["rollbacks"], stored["target"])


def choose_target(committed: Sequence[int], last_target: int | None) -> int:
    """The step to go back to: the newest committed one, or the one before it if the last rollback went there already.

    `committed` ascends. Where there is none, step 0, the initial state.
    """
    if not committed:
        return 0
    again = committed[-1] == last_target and len(committed) > 1
    return committed[-2] if again else committed[-1]


def merged(skip: Sequence[Interval], first: int, stop: int) -> list[Interval]:
    """`skip` and [first, stop), sorted, with what touches or overlaps made one."""
    found: list[Interval] = []
    for low, high in sorted([*skip, (first, stop)]):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        elif low < high:
            found.append((low, high))
    return found
