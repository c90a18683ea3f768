"""The report's figures of scaling, from the JSON of `benchmarks/train_scaling.py`. These fields are read:

    {"scaling": [{"mode": "strong" | "weak", "ranks": N, "tokens_per_second": x, "compute_seconds": a,
                  "communication_seconds": b, "checkpoint_stall_seconds": c}, ...]}

`mode`, `ranks` and `tokens_per_second` (over all ranks) must be there; the seconds, of any common unit of work, may be
missing. Fields beside these are left alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import plotly.graph_objects as go

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.tools.metrics_file import Line, number
from mpi_ckpt.tools.report_style import ALERT, QUIET, Figure, colour, drawing, numbers

_MODES = {"strong": "the same global batch", "weak": "the same batch a rank"}
_PARTS = {"compute": colour(0), "communication": colour(1), "checkpoint_stall": ALERT}


def read_scaling(path: Path) -> list[Line]:
    """**Local.** The measurements. Raises CheckpointError for anything else, OSError."""
    try:
        document = json.loads(path.read_bytes())
        rows = document["scaling"]
        good = bool(rows) and all(
            row["mode"] in _MODES and number(row, "ranks") >= 1 and number(row, "tokens_per_second") > 0 for row in rows
        )
        found = f"{len(rows)} measurements, not all of them whole" if rows else "no measurement"
    except (ValueError, KeyError, TypeError) as error:
        good, found = False, f"{type(error).__name__}: {error}"
    if not good:
        raise CheckpointError(
            "this is no scaling result",
            path=path,
            found=found,
            expected='{"scaling": [{"mode": "strong" or "weak", "ranks": N, "tokens_per_second": x, ...}, ...]}',
            action="Name a file that benchmarks/train_scaling.py --json has written.",
        )
    return sorted(rows, key=lambda row: row["ranks"])


def scaling(rows: list[Line]) -> list[Figure]:
    """Throughput, efficiency, and where the time goes."""
    modes = {mode: [row for row in rows if row["mode"] == mode] for mode in _MODES}
    present = {mode: found for mode, found in modes.items() if found}
    splits = [figure for mode, found in present.items() if (figure := _split(mode, found)) is not None]
    return [_throughput(present), _efficiency(present), *splits]


def _throughput(modes: dict[str, list[Line]]) -> Figure:
    figure = drawing("ranks", "tokens a second")
    for at, (mode, rows) in enumerate(modes.items()):
        ranks = [row["ranks"] for row in rows]
        figure.add_scatter(
            x=ranks, y=numbers([row["tokens_per_second"] for row in rows]), name=mode, mode="lines+markers",
            line=dict(color=colour(at), width=1.6), hovertemplate="%{x} ranks<br>%{y:,.5g} tokens/s<extra></extra>",
        )  # fmt: skip
        ideal = numbers([rows[0]["tokens_per_second"] * n / ranks[0] for n in ranks])
        figure.add_scatter(
            x=ranks, y=ideal, name="proportional", mode="lines", line=dict(color=QUIET, width=1, dash="dot"),
            hoverinfo="skip", showlegend=at == 0,
        )  # fmt: skip
    _ranks_axis(figure, modes)
    slowest = min(row["tokens_per_second"] for rows in modes.values() for row in rows)
    doublings = [slowest * 2**k for k in range(12)]  # a grid on which proportional is the diagonal
    figure.update_yaxes(type="log", tickvals=doublings, ticktext=[f"{value:,.0f}" for value in doublings])
    note = "Both axes are logarithmic; " + "; ".join(f"{mode}: {_MODES[mode]}" for mode in modes)
    return Figure("Throughput", f"{note}.", figure)


def _efficiency(modes: dict[str, list[Line]]) -> Figure:
    """Tokens a second a rank, as a part of those at the least number of ranks."""
    figure = drawing("ranks", "percent")
    for at, (mode, rows) in enumerate(modes.items()):
        each = [row["tokens_per_second"] / row["ranks"] for row in rows]
        figure.add_scatter(
            x=[row["ranks"] for row in rows], y=numbers([rate / each[0] for rate in each], 100), name=mode,
            mode="lines+markers", line=dict(color=colour(at), width=1.6),
            hovertemplate="%{x} ranks<br>%{y:.4g} %<extra></extra>",
        )  # fmt: skip
    _ranks_axis(figure, modes)
    figure.update_yaxes(rangemode="tozero")
    return Figure("Parallel efficiency", "Tokens a second a rank, of those at the least number of ranks.", figure)


def _split(mode: str, rows: list[Line]) -> Figure | None:
    """Percent of the time in each part, a bar a number of ranks."""
    figure = drawing("ranks", "percent of the time", barmode="stack", bargap=0.35)
    totals = [sum(_seconds(row, part) for part in _PARTS) for row in rows]
    if not any(totals):
        return None
    for part, ink in _PARTS.items():
        shares = [_seconds(row, part) / total if total else math.nan for row, total in zip(rows, totals, strict=True)]
        name = part.replace("_", " ")
        figure.add_bar(
            x=[str(row["ranks"]) for row in rows], y=numbers(shares, 100), name=name, marker=dict(color=ink),
            hovertemplate=f"%{{x}} ranks<br>{name} %{{y:.3g}} %<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, 100])
    return Figure(f"Where the time goes, {mode} scaling", f"{_MODES[mode].capitalize()}.", figure)


def _seconds(row: Line, part: str) -> float:
    seconds = number(row, f"{part}_seconds")
    return seconds if seconds >= 0 else 0.0


def _ranks_axis(figure: go.Figure, modes: dict[str, list[Line]]) -> None:
    """Powers of two far apart alike."""
    ranks = sorted({row["ranks"] for rows in modes.values() for row in rows})
    figure.update_xaxes(type="log", tickvals=ranks, ticktext=[str(n) for n in ranks])
