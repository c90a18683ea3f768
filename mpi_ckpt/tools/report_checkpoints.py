"""The report's figures of checkpoints and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any

from mpi_ckpt.tools.history import Save
from mpi_ckpt.tools.report_decimate import extremes
from mpi_ckpt.tools.report_style import ALERT, INK, Figure, Run, colour, drawing, log_if_spread, numbers, points
from mpi_ckpt.tools.report_timeline import timeline

_MOST_BARS = 48  # ranks; more of them are a curve


def checkpoints(runs: Sequence[Run]) -> list[Figure]:
    """A timeline for each run; what a save costs, of all of them."""
    found = [timeline(run, len(runs) == 1) for run in runs]
    return [figure for figure in (*found, _cost(runs), _rate(runs)) if figure is not None]


def memory(runs: Sequence[Run]) -> list[Figure]:
    """A figure for each run whose log has it."""
    return [_memory(run, len(runs) == 1) for run in runs if any(run.reader.history.memory.values())]


def _cost(runs: Sequence[Run]) -> Figure | None:
    """Seconds a save, by step: the stall of training, the writing, the whole commit."""
    kinds = {
        "stall": ("stall_seconds", ALERT, "circle"),
        "write": ("write_seconds", "var(--run-2)", "diamond-open"),
        "commit": ("commit_seconds", "var(--run-0)", "circle-open"),
    }
    figure, drawn = drawing("step", "seconds"), []
    for run in runs:
        for kind, (name, ink, symbol) in kinds.items():
            saves, values = _values(run, attrgetter(name))
            drawn += values
            one = len(runs) == 1
            points(
                figure, kind if one else f"{run.name}, {kind}", [save.step for save in saves], numbers(values),
                ink if one else run.colour, marker=dict(symbol=symbol, size=6),
                hovertemplate=f"step %{{x:,}}<br>{kind} %{{y:.4g}} s<extra></extra>",
            )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    log_if_spread(figure, drawn, "seconds")
    note = "Stall: what training waited. Write: the slowest rank's. Commit: from the save's begin until it is durable."
    return Figure("Cost of a checkpoint", note, figure) if figure.data else None


def _rate(runs: Sequence[Run]) -> Figure | None:
    """MB/s a rank, by step."""
    figure = drawing("step", "MB/s a rank", showlegend=len(runs) > 1)
    for run in runs:
        saves, values = _values(run, lambda save: save.rate)
        points(
            figure, run.name, [save.step for save in saves], numbers(values, 1e-6), run.colour,
            hovertemplate="step %{x:,}<br>%{y:.4g} MB/s a rank<br>%{customdata:,} bytes<extra></extra>",
            customdata=[int(save.nbytes) for save in saves],
        )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    note = (
        "Bytes of all ranks by the ranks and the slowest one's write time (or the commit's, where that is not known)."
    )
    return Figure("Write rate", note, figure) if figure.data else None


def _values(run: Run, value: Callable[[Save], float]) -> tuple[list[Save], list[float]]:
    """The saves that have the value, decimated, and their values."""
    saves = [save for save in run.reader.history.saves if math.isfinite(value(save))]
    kept, _ = extremes([value(save) for save in saves])
    return [saves[i] for i in kept], [value(saves[i]) for i in kept]


def _memory(run: Run, one: bool) -> Figure:
    """MiB a rank: what the parameters, gradients and optimizer state take, and the process as a whole."""
    memory = run.reader.history.memory
    figure = drawing("rank", "MiB", barmode="stack", bargap=0.25)
    ranks = max(map(len, memory.values()))
    resident = memory["resident"]
    for number, name in enumerate(("params", "gradients", "optimizer")):
        options: dict[str, Any] = dict(name=name, hovertemplate=f"rank %{{x}}<br>{name} %{{y:.4g}} MiB<extra></extra>")
        values, x = numbers(memory[name], 2**-20), list(range(len(memory[name])))
        if ranks <= _MOST_BARS:
            figure.add_bar(x=x, y=values, marker=dict(color=colour(number)), **options)
        else:
            line = dict(color=colour(number), width=1.4)
            figure.add_scatter(x=x, y=values, mode="lines", stackgroup="state", line=line, **options)
    kept, _ = extremes(resident)
    points(
        figure, "resident", kept, numbers([resident[i] for i in kept], 2**-20), INK, marker=dict(symbol="line-ew-open"),
        hovertemplate="rank %{x}<br>resident %{y:.4g} MiB<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(tickformat=",d", dtick=1 if ranks <= 16 else None)
    peaks = {name: [value / 2**20 for value in values if math.isfinite(value)] for name, values in memory.items()}
    said = ", ".join(f"{name} {max(v):,.1f} and {fmean(v):,.1f}" for name, v in peaks.items() if v)
    note = f"Stacked: the training state; a dash: the process's resident set. Max and mean, MiB: {said}."
    return Figure("Memory a rank" + ("" if one else f": {run.name}"), note, figure, wide=one)
