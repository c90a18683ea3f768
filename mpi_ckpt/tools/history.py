"""What a run's log says about the run so far, for people who look at it: `report` and `watch`.

Of repeated steps the last row counts. The rows that a resume or a rollback has taken back are kept apart, as
*abandoned* attempts.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mpi_ckpt.tools.metrics_file import Line, number, step_of

COLUMNS = ("loss", "lr", "grad_norm", "step_seconds", "communication_seconds", "tokens_per_second", "time")
_ENDINGS = {"preemption": "preempted", "hang": "hung"}
MEMORY = ("params", "gradients", "optimizer", "resident")


class Curve:
    """Rows of ascending steps, a column a quantity: eight bytes a number, NaN where a row does not say it."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns = {name: array("d") for name in COLUMNS}

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> array[float]:
        return self.columns[name]

    def append(self, step: int, row: Line) -> None:
        """A row of a step later than all there are."""
        self.steps.append(step)
        for name, column in self.columns.items():
            column.append(number(row, name))

    def cut_from(self, step: int) -> Curve:
        """Remove the rows of `step` and later; they are returned."""
        at, cut = bisect.bisect_left(self.steps, step), Curve()
        cut.steps = self.steps[at:]
        del self.steps[at:]
        for name, column in self.columns.items():
            cut.columns[name] = column[at:]
            del column[at:]
        return cut


@dataclass
class Save:
    """A checkpoint's life. Times are seconds since 1970, NaN where the log does not say them.

    `state` is 'in flight', 'committed', 'pruned', 'damaged', 'replaced' (the same step was committed again),
    'discarded' (by a rollback, or a launch that went on from an earlier step), or 'lost' (the launch ended before it
    was committed); `gone` is when it stopped being a checkpoint.
    """

    step: int
    ranks: float = math.nan
    nbytes: float = math.nan  # over all ranks
    staged: float = math.nan
    committed: float = math.nan
    gone: float = math.nan
    stall_seconds: float = math.nan
    write_seconds: float = math.nan  # the slowest rank's
    commit_seconds: float = math.nan
    state: str = "in flight"

    @property
    def rate(self) -> float:
        """Bytes a second that each rank wrote: while it wrote, or of the whole commit where that is all one knows."""
        seconds = self.commit_seconds if math.isnan(self.write_seconds) else self.write_seconds
        return self.nbytes / self.ranks / seconds if seconds > 0 and self.ranks > 0 else math.nan


@dataclass
class History:
    """Everything one run's log has said, line by line."""

    curve: Curve = field(default_factory=Curve)
    abandoned: list[Curve] = field(default_factory=list)
    evaluations: dict[int, Line] = field(default_factory=dict)  # by step, the last one of each
    saves: list[Save] = field(default_factory=list)  # in the order of the log
    events: list[Line] = field(default_factory=list)  # all but those of saves, evaluations and memory
    memory: dict[str, list[float]] = field(default_factory=dict)  # bytes by rank, the newest
    ranks: float = math.nan  # of the newest launch
    began: float = math.nan  # the first time in the log
    last: Line = field(default_factory=dict)
    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=64))  # step rows of this attempt
    _by_step: dict[int, Save] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """One line of the log, later than all before it. Unknown events, and fields of them, are kept."""
        if math.isnan(self.began):
            self.began = number(line, "time")
        step, event = step_of(line), line.get("event")
        if event is None and step is not None:
            self._abandon(step)
            self.curve.append(step, line)
            self.recent.append(line)
        elif isinstance(event, str):
            self._event(event, step, line)
        self.last = line

    @property
    def launches(self) -> int:
        """How often the run was launched, at least once where it has a row."""
        return max(sum(event["event"] == "launch" for event in self.events), min(1, len(self.curve)))

    def count(self, event: str) -> int:
        """How often an event happened."""
        return sum(line["event"] == event for line in self.events)

    @property
    def outcome(self) -> str:
        """How the newest launch has ended, as far as the log says: '' for one that runs, or was killed."""
        for line in reversed(self.events):
            if line["event"] == "finish":
                return str(line.get("reason", "finished"))
            if line["event"] in _ENDINGS:
                return _ENDINGS[line["event"]]
            if line["event"] == "launch":
                break
        return ""

    def newest_committed(self) -> Save | None:
        """The newest save that is a checkpoint now."""
        return next((save for save in reversed(self.saves) if save.state == "committed"), None)

    def in_flight(self) -> Save | None:
        """The save that is being written now."""
        return self.saves[-1] if self.saves and self.saves[-1].state == "in flight" else None

    def _abandon(self, step: int) -> None:
        """The rows of `step` and later no longer count."""
        if self.curve.steps and step <= self.curve.steps[-1]:
            self.abandoned.append(self.curve.cut_from(step))
            self.evaluations = {at: line for at, line in self.evaluations.items() if at < step}
            self.recent.clear()

    def _event(self, event: str, step: int | None, line: Line) -> None:
        if event in ("checkpoint", "commit", "prune", "damage") and step is not None:
            self._saved(event, step, line)
        if event == "evaluation" and step is not None:
            self.evaluations[step] = line
        elif event not in ("checkpoint", "commit", "prune", "memory"):
            self.events.append(line)
        if event == "launch":
            self.ranks = number(line, "ranks")
            for save in self.saves:
                save.state = "lost" if save.state == "in flight" else save.state
        target = {"launch": step, "rollback": line.get("target")}.get(event)
        if isinstance(target, int):
            self._abandon(target + 1)
            for save in self.saves:
                if save.step > target and save.state == "committed":
                    save.state, save.gone = "discarded", number(line, "time")
        if event == "memory":
            self.memory = {name: _numbers(line.get(name)) for name in MEMORY}

    def _saved(self, event: str, step: int, line: Line) -> None:
        save, now = self._by_step.get(step), number(line, "time")
        if event in ("prune", "damage"):
            if save and save.state == "committed":
                save.state, save.gone = {"prune": "pruned", "damage": "damaged"}[event], now
            return
        if event == "checkpoint" or save is None or save.state != "in flight":
            if save and save.state == "committed":
                save.state, save.gone = "replaced", now
            save = Save(step, self.ranks, staged=now if event == "checkpoint" else math.nan)
            self._by_step[step] = save
            self.saves.append(save)
        if event == "commit":
            save.state, save.committed = "committed", now
        for name in ("nbytes", "stall_seconds", "write_seconds", "commit_seconds"):
            value = number(line, name)
            if not math.isnan(value):
                setattr(save, name, value)


def _numbers(values: Any) -> list[float]:
    return [number({"value": value}, "value") for value in values] if isinstance(values, list) else []
