"""The report's curves over the steps: loss, learning rate, gradient norm, step time; several runs over each other."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from mpi_ckpt.tools.history import Curve, Save
from mpi_ckpt.tools.metrics_file import Line, number, step_of
from mpi_ckpt.tools.report_decimate import BUCKETS, extremes
from mpi_ckpt.tools.report_style import ALERT, Figure, Run, drawing, log_if_spread, numbers, points

# What interrupts a curve, and how it is marked on it.
_MARKS = {
    "resumed": ("launch", "triangle-right"),
    "rolled back": ("rollback", "x"),
    "preempted": ("preemption", "square"),
}
_MOST_ABANDONED = 200  # attempts that are drawn, the newest


def curves(runs: Sequence[Run]) -> list[Figure]:
    """Those that the runs have data for."""
    drawers: list[Callable[[Sequence[Run]], Figure | None]] = [_loss, _learning_rate, _gradient_norm, _step_time]
    return [figure for drawer in drawers if (figure := drawer(runs)) is not None]


def _loss(runs: Sequence[Run]) -> Figure | None:
    if not _any(runs, "loss"):
        return None
    figure = drawing("step", "loss, nats a token", height=380)
    size = 1
    for run in runs:
        history, one = run.reader.history, len(runs) == 1
        _abandoned(figure, run)
        size = max(size, _line(figure, "training" if one else run.name, history.curve, "loss", run.colour))
        evaluations = sorted(history.evaluations.items())
        losses = numbers([number(line, "eval_loss") for _, line in evaluations])
        points(
            figure, "evaluation" if one else f"{run.name}, evaluation", [step for step, _ in evaluations], losses,
            "var(--run-1)" if one else run.colour, mode="lines+markers", line=dict(width=1, dash="dot"),
            marker=dict(symbol="diamond-open" if not one else "diamond"),
            hovertemplate="step %{x:,}<br>evaluation %{y:.5g}<extra></extra>",
        )  # fmt: skip
        _marks(figure, run, one)
    note = (
        f"{_drawn(size)} Repeated steps: the last attempt counts, those taken back by a resume or rollback are faint."
    )
    return Figure("Loss", note + _keep_in_sight(figure, runs), figure, wide=True)


def _keep_in_sight(figure: go.Figure, runs: Sequence[Run]) -> str:
    """Show the losses that count although attempts that were taken back went far above them; says so, if it does."""
    histories = [run.reader.history for run in runs]
    counted = [value for history in histories for value in history.curve["loss"] if math.isfinite(value)]
    others = [value for history in histories for curve in history.abandoned for value in curve["loss"]]
    if not counted or max((value for value in others if math.isfinite(value)), default=0.0) <= (
        top := 2 * max(counted)
    ):
        return ""
    pad = 0.05 * (max(counted) - min(counted)) or 0.05
    figure.update_yaxes(range=[min(counted) - pad, top])
    return f" Some of these went above {top:.3g}: a double-click shows them too."


def _learning_rate(runs: Sequence[Run]) -> Figure | None:
    return _plain(runs, "lr", "Learning rate", "learning rate", "")


def _gradient_norm(runs: Sequence[Run]) -> Figure | None:
    return _plain(runs, "grad_norm", "Gradient norm", "global L2 norm", "Before clipping. ")


def _plain(runs: Sequence[Run], column: str, title: str, axis: str, note: str) -> Figure | None:
    if not _any(runs, column):
        return None
    figure, size = drawing("step", axis, showlegend=len(runs) > 1), 1
    for run in runs:
        size = max(size, _line(figure, run.name, run.reader.history.curve, column, run.colour))
    figure.update_yaxes(rangemode="tozero")
    log_if_spread(figure, [value for run in runs for value in run.reader.history.curve[column]], axis)
    return Figure(title, note + _drawn(size), figure)


def _step_time(runs: Sequence[Run]) -> Figure | None:
    """Milliseconds a step; a stall stands on the step that it followed."""
    if not _any(runs, "step_seconds"):
        return None
    figure, size, drawn = drawing("step", "milliseconds"), 1, array("d")
    for run in runs:
        curve, one = run.reader.history.curve, len(runs) == 1
        name = "step" if one else run.name
        size = max(size, _line(figure, name, curve, "step_seconds", run.colour, scale=1e3))
        if one and _any(runs, "communication_seconds"):
            _line(figure, "of it communication", curve, "communication_seconds", "var(--run-2)", scale=1e3)
        drawn += curve["step_seconds"]
        drawn += _stalls(figure, run, one)
    figure.update_yaxes(rangemode="tozero")
    log_if_spread(figure, drawn, "milliseconds")
    note = "A checkpoint's stall stands on the step that it followed. "
    return Figure("Step time", note + _drawn(size), figure, wide=True)


def _stalls(figure: go.Figure, run: Run, one: bool) -> array[float]:
    """Upright lines from the step's time to that and the stall; returns their tops in seconds."""
    curve = run.reader.history.curve
    at = {step: seconds for step, seconds in zip(curve.steps, curve["step_seconds"], strict=True)}
    saves = [save for save in run.reader.history.saves if save.step in at and save.stall_seconds >= 0]
    kept, _ = extremes([save.stall_seconds for save in saves], BUCKETS // 2)
    shown: list[Save] = [saves[i] for i in kept]
    x, y, tops = [], [], array("d")
    for save in shown:
        below = at[save.step]
        tops.append(below + save.stall_seconds)
        x += [save.step, save.step, None]
        y += [*numbers([below, tops[-1]], 1e3), None]
    options = dict(legendgroup=f"stall {run.number}", hoverinfo="skip")
    colour = ALERT if one else run.colour
    if shown:
        figure.add_scatter(x=x, y=y, mode="lines", line=dict(color=colour, width=1), showlegend=False, **options)
    points(
        figure, "checkpoint stall" if one else f"{run.name}, checkpoint stall", [save.step for save in shown],
        numbers(tops, 1e3), colour, marker=dict(size=5), legendgroup=f"stall {run.number}",
        customdata=numbers([save.stall_seconds for save in shown], 1e3),
        hovertemplate="step %{x:,}<br>stall %{customdata:.4g} ms<extra></extra>",
    )  # fmt: skip
    return tops


def _line(figure: go.Figure, name: str, curve: Curve, column: str, colour: str, scale: float = 1.0) -> int:
    """One quantity over the steps; returns how many steps share a bucket."""
    kept, size = extremes(curve[column])
    steps, values = [curve.steps[i] for i in kept], numbers([curve[column][i] for i in kept], scale)
    figure.add_scatter(
        x=steps, y=values, name=name, mode="lines+markers" if len(kept) == 1 else "lines",
        line=dict(color=colour, width=1.6), hovertemplate=f"step %{{x:,}}<br>{name} %{{y:.5g}}<extra></extra>",
    )  # fmt: skip
    return size


def _abandoned(figure: go.Figure, run: Run) -> None:
    """All the attempts that do not count, as one faint curve with gaps."""
    steps: list[int | None] = []
    losses: list[float | None] = []
    attempts = run.reader.history.abandoned[-_MOST_ABANDONED:]
    for attempt in attempts:
        kept, _ = extremes(attempt["loss"], max(10, BUCKETS // len(attempts)))
        steps += [*(attempt.steps[i] for i in kept), None]
        losses += [*numbers([attempt["loss"][i] for i in kept]), None]
    if steps:
        figure.add_scatter(
            x=steps, y=losses, name="taken back", mode="lines", opacity=0.4, showlegend=run.number == 0,
            line=dict(color=run.colour, width=3), hovertemplate="step %{x:,}<br>taken back, %{y:.5g}<extra></extra>",
        )  # fmt: skip


def _marks(figure: go.Figure, run: Run, one: bool) -> None:
    """Where the run was interrupted, on its curve."""
    curve = run.reader.history.curve
    at = dict(zip(curve.steps, curve["loss"], strict=True))
    for name, (event, symbol) in _MARKS.items():
        found = [line for line in run.reader.history.events if line["event"] == event]
        steps = [step for line in found if (step := _place(line)) is not None and math.isfinite(at.get(step, math.nan))]
        if steps:
            points(
                figure, name, steps, numbers([at[step] for step in steps]), "var(--ink)" if one else run.colour,
                marker=dict(symbol=symbol, size=9, line=dict(color="var(--paper)", width=1)), legendgroup=name,
                showlegend=not any(trace.name == name for trace in figure.data),
                hovertemplate=f"{name} at step %{{x:,}}<extra></extra>",
            )  # fmt: skip


def _place(line: Line) -> int | None:
    """The step of the curve at which an event shows; a first launch interrupts nothing."""
    target = line.get("target")
    if line["event"] == "rollback" and isinstance(target, int):
        return target
    return step_of(line) or None


def _any(runs: Sequence[Run], column: str) -> bool:
    return any(math.isfinite(value) for run in runs for value in run.reader.history.curve[column])


def _drawn(size: int) -> str:
    return "Every step is drawn." if size == 1 else f"Of every {size:,} steps the lowest and the highest are drawn."
