"""How the report's figures look: one plain layout, colours by name. Needs plotly (extra `report`).

A colour is a CSS variable, `var(--run-0)`: the page's style sheet says what it is in light and in dark, and its script
puts it in. No colour is written down twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from mpi_ckpt.tools.run_reader import RunReader

COLOURS = 8  # as many as the style sheet has; more runs begin anew
INK, QUIET, LINE, ALERT = "var(--ink)", "var(--quiet)", "var(--line)", "var(--alert)"


@dataclass(frozen=True)
class Run:
    """A run in the report: what it is called, its files' contents, its place among the runs."""

    name: str
    reader: RunReader
    number: int

    @property
    def colour(self) -> str:
        """Of everything that is this run's."""
        return colour(self.number)


@dataclass(frozen=True)
class Figure:
    """A drawing with what a reader needs beside it; `wide` ones take the whole width of the page."""

    title: str
    note: str
    drawing: go.Figure
    wide: bool = False


def colour(number: int) -> str:
    """The CSS variable of the colour of this number."""
    return f"var(--run-{number % COLOURS})"


def drawing(x: str, y: str, **layout: Any) -> go.Figure:
    """An empty drawing with the titles of its axes, their units among them."""
    axis: dict[str, Any] = dict(
        gridcolor=LINE,
        linecolor=LINE,
        zeroline=False,
        automargin=True,
        ticks="",
        separatethousands=True,
        exponentformat="power",
    )
    base = dict(
        template="none",
        autosize=True,
        height=320,
        margin=dict(l=8, r=8, t=8, b=8),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font=dict(color=QUIET, size=12),
        hovermode="closest",
        hoverlabel=dict(bgcolor="var(--paper)", bordercolor=LINE, font=dict(color=INK)),
        legend=dict(orientation="h", x=0, y=1.02, yanchor="bottom", traceorder="normal", font=dict(color=INK)),
        showlegend=True,
        xaxis=axis | dict(title=dict(text=x, standoff=8), showgrid=False, showline=True),
        yaxis=axis | dict(title=dict(text=y, standoff=8)),
    )
    figure = go.Figure(layout=base)
    figure.update_layout(**layout)
    return figure


def numbers(values: Sequence[float], scale: float = 1.0) -> list[float | None]:
    """Six digits of each, scaled; None, a gap, for what is not finite."""
    return [float(f"{value * scale:.6g}") if math.isfinite(value) else None for value in values]


def points(figure: go.Figure, name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **options: Any) -> None:
    """Add markers; nothing where there are no points."""
    marker = dict(color=colour, size=7) | options.pop("marker", {})
    if len(x):
        figure.add_scatter(x=x, y=y, name=name, mode=options.pop("mode", "markers"), marker=marker, **options)


def log_if_spread(figure: go.Figure, values: Sequence[float], title: str) -> None:
    """A logarithmic y axis, and saying so, where the largest value would flatten all the others."""
    good = sorted(value for value in values if math.isfinite(value) and value > 0)
    if good and good[-1] > 12 * good[len(good) // 2]:
        figure.update_yaxes(type="log", title_text=f"{title}, log scale", dtick=1)
