"""When a save is due: every so many steps, every so much time, or as often as pays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = "'30s', '10min', '2h' or '1d'"
_FIRST_AUTO = 60.0  # seconds until the first save of "auto", which measures what a save costs


@dataclass(frozen=True)
class Cadence:
    """Exactly one of the three is set; none of them means that nothing is ever due by itself."""

    steps: int | None = None
    seconds: float | None = None
    mean_time_between_failures: float | None = None  # seconds; set for "auto"

    @classmethod
    def parse(cls, every: str | None, mean_time_between_failures: str = "1d", *, name: str = "every") -> Cadence:
        """The cadence that `every`, the option `name`, says. Raises ValueError saying what was found and expected."""
        if every is None:
            return cls()
        if every == "auto":
            return cls(
                mean_time_between_failures=parse_duration("mean_time_between_failures", mean_time_between_failures)
            )
        match = re.fullmatch(r"([1-9]\d*)\s*steps?", str(every).strip())
        if match:
            return cls(steps=int(match[1]))
        return cls(seconds=parse_duration(name, every, f"'500steps', {_DURATION}, or 'auto'"))

    @property
    def needs_clock(self) -> bool:
        """True when the decision depends on time, so that one rank must take it for all."""
        return self.seconds is not None or self.mean_time_between_failures is not None

    def due(self, step: int, elapsed: float, cost: float | None) -> bool:
        """Whether to save after `step`, `elapsed` seconds after the last save, when a save costs `cost` seconds."""
        if self.steps is not None:
            return step % self.steps == 0
        if self.seconds is not None:
            return elapsed >= self.seconds
        if self.mean_time_between_failures is not None:
            wait = _FIRST_AUTO if cost is None else optimal_interval(cost, self.mean_time_between_failures)
            return elapsed >= wait
        return False


def optimal_interval(cost: float, mean_time_between_failures: float) -> float:
    """Seconds of work between two saves that lose the least time to saving and to failures.

    `cost` (seconds a save keeps the application from working) and the mean time between failures (seconds) are given;
    Daly, "A higher order estimate of the optimum checkpoint interval" (2006), eq. 37, which refines Young (1974):
    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C for C < 2 M, and M otherwise.
    """
    c, m = cost, mean_time_between_failures
    if c >= 2 * m:
        return m
    return math.sqrt(2 * c * m) * (1 + math.sqrt(c / (2 * m)) / 3 + c / (18 * m)) - c


def parse_duration(name: str, text: str, form: str = _DURATION) -> float:
    """Seconds in '90s', '10min', '2h', '1d'. Raises ValueError naming the option, found and expected."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", str(text).strip())
    if not match or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"{name}: found {text!r}, expected {form}")
    return float(match[1]) * _UNITS[match[2]]
