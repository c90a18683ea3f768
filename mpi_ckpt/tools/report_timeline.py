"""The report's timeline of checkpoints: when each was staged, written, committed, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from mpi_ckpt.tools.history import History, Save
from mpi_ckpt.tools.metrics_file import number
from mpi_ckpt.tools.report_style import ALERT, QUIET, Figure, Run, drawing, points

_UNITS = ((120, 1, "seconds"), (7200, 60, "minutes"), (172_800, 3600, "hours"), (math.inf, 86_400, "days"))
_MOST_SAVES = 1000  # that are drawn, the newest
_ENDS = {
    "pruned": ("circle-open", QUIET),
    "discarded": ("triangle-left-open", QUIET),
    "damaged": ("x", ALERT),
    "lost": ("x-thin-open", ALERT),
}


def timeline(run: Run, one: bool) -> Figure | None:
    """A line from the commit to the end of each checkpoint's life; None for a log that has no saves, or no times.

    `one` says that there is no other run beside it.
    """
    history = run.reader.history
    saves = [save for save in history.saves if math.isfinite(save.staged) or math.isfinite(save.committed)]
    shown = saves[-_MOST_SAVES:]
    clock = _Clock.of(history)
    if not shown or clock is None:
        return None
    figure = drawing(f"{clock.name} since the run began", "step")
    _lives(figure, run.colour, shown, clock)
    committed = [save for save in shown if math.isfinite(save.committed)]
    written = [save for save in committed if math.isfinite(save.staged + save.write_seconds)]
    _mark(figure, "staged", clock, shown, lambda save: save.staged, "line-ns-open", run.colour)
    _mark(figure, "written", clock, written, _written, "diamond-open", run.colour)
    _mark(figure, "committed", clock, committed, lambda save: save.committed, "circle", run.colour)
    for state, (symbol, colour) in _ENDS.items():
        ended = [save for save in shown if save.state == state]
        _mark(figure, state, clock, ended, _ended, symbol, colour)
    figure.update_xaxes(rangemode="tozero")
    note = "From the commit until it was pruned, replaced, discarded by a rollback, or set aside."
    if len(shown) < len(saves):
        note += f" The newest {len(shown):,} of {len(saves):,} saves are drawn."
    return Figure("Checkpoint timeline" + ("" if one else f": {run.name}"), note, figure, wide=one)


@dataclass(frozen=True)
class _Clock:
    """Times of the log as the time since the run began, in a unit that suits its length."""

    began: float
    end: float
    unit: float  # seconds
    name: str

    @classmethod
    def of(cls, history: History) -> _Clock | None:
        """None for a log without times."""
        newest = [time for save in history.saves[-1:] for time in (save.staged, save.committed, save.gone)]
        end = max((time for time in (*newest, number(history.last, "time")) if math.isfinite(time)), default=math.nan)
        length = end - history.began
        if not math.isfinite(length):
            return None
        unit, name = next((unit, name) for limit, unit, name in _UNITS if length < limit)
        return cls(history.began, end, unit, name)

    def __call__(self, time: float) -> float | None:
        return round((time - self.began) / self.unit, 4) if math.isfinite(time) else None


def _lives(figure: go.Figure, colour: str, saves: Sequence[Save], clock: _Clock) -> None:
    x: list[float | None] = []
    y: list[int | None] = []
    for save in saves:
        if math.isfinite(save.committed):
            x += [clock(save.committed), clock(save.gone if math.isfinite(save.gone) else clock.end), None]
            y += [save.step, save.step, None]
    figure.add_scatter(
        x=x, y=y, mode="lines", name="is a checkpoint", line=dict(color=colour, width=2.5), opacity=0.45,
        hoverinfo="skip",
    )  # fmt: skip


def _mark(
    figure: go.Figure,
    name: str,
    clock: _Clock,
    saves: Sequence[Save],
    when: Callable[[Save], float],
    symbol: str,
    colour: str,
) -> None:
    points(
        figure, name, [clock(when(save)) for save in saves], [save.step for save in saves], colour,
        marker=dict(symbol=symbol), hovertemplate=f"step %{{y:,}} {name}<br>%{{x:.4g}} {clock.name}<extra></extra>",
    )  # fmt: skip


def _written(save: Save) -> float:
    """When the slowest rank's file was complete: its writing began when the state was staged."""
    return min(save.committed, save.staged + save.write_seconds)


def _ended(save: Save) -> float:
    """When the save stopped being a checkpoint, or was last heard of."""
    return save.gone if math.isfinite(save.gone) else save.staged
