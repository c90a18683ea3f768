"""Which committed steps have to go: decided by a pure function, done by thin ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpi_ckpt.checkpoint import steps as step_directories
from mpi_ckpt.storage import names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """What stays: the newest `keep` rotating steps (None: all), and beside them some that do not rotate.

    `keep_every` keeps every step that it divides; `best_metric` the `keep_best` steps whose metric of that name is
    smallest ('min') or largest ('max').
    """

    keep: int | None = 3
    keep_every: int | None = None
    best_metric: str | None = None
    best_mode: str = "min"
    keep_best: int = 1

    def __post_init__(self) -> None:
        for name, value, optional in (
            ("keep", self.keep, True),
            ("keep_every", self.keep_every, True),
            ("keep_best", self.keep_best, False),
        ):
            good = (value is None and optional) or (type(value) is int and value >= 1)
            if not good:
                raise ValueError(f"{name}: found {value!r}, expected an int of 1 or more{', or None' * optional}")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f"best_mode: found {self.best_mode!r}, expected 'min' or 'max'")

    @property
    def keeps_all(self) -> bool:
        """Whether no step ever has to go."""
        return self.keep is None


def choose(
    steps: Sequence[int],
    policy: Policy,
    *,
    held: frozenset[int] = frozenset(),
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    incoming: int = 0,
) -> list[int]:
    """The steps to delete, oldest first.

    `held` are steps that must not go: pinned, or the one restored from. `metrics` are those saved with each step.
    `incoming` is the number of saves that are about to come: as many fewer of the present steps stay. Never all of
    them go: a single kept step is replaced only once its successor is there.
    """
    if policy.keep is None or policy.keep <= incoming:
        return []
    lasting = set(held) | set(_best(steps, policy, metrics or {}))
    if policy.keep_every is not None:
        lasting |= {step for step in steps if step % policy.keep_every == 0}
    rotating = sorted(set(steps) - lasting)
    return rotating[: max(0, len(rotating) - (policy.keep - incoming))]


def _best(steps: Sequence[int], policy: Policy, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
    if policy.best_metric is None:
        return []
    sign = 1 if policy.best_mode == "min" else -1
    scores = {step: sign * metrics.get(step, {}).get(policy.best_metric, math.nan) for step in steps}
    ranked = sorted((score, -step) for step, score in scores.items() if not math.isnan(score))
    return [-newest for _, newest in ranked[: policy.keep_best]]


def prune(root: Path, doomed: Sequence[int]) -> list[int]:
    """**Local.** Delete steps and return those that are gone; one that cannot be deleted is logged and left.

    The manifest goes first: once deletion has begun, the step is no checkpoint any more, whatever happens.
    """
    gone = []
    for step in doomed:
        directory = names.step_dir(root, step)
        try:
            step_directories.delete(directory)
        except OSError as error:
            logger.warning("cannot delete step %d, going on: %s", step, error)
        if not step_directories.is_committed(directory):
            gone.append(step)
    return gone
