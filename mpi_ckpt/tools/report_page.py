"""The report's page: figures and tables in one HTML file that needs nothing but itself. Needs plotly."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import resources

from plotly.offline import get_plotlyjs

from mpi_ckpt.tools import report_tables as tables
from mpi_ckpt.tools.metrics_file import Line
from mpi_ckpt.tools.report_checkpoints import checkpoints, memory
from mpi_ckpt.tools.report_curves import curves
from mpi_ckpt.tools.report_scaling import scaling
from mpi_ckpt.tools.report_style import Figure, Run

# The page may load nothing: the browser itself holds it to that.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_HOW = "Drag in a figure to see a part of it, double-click for the whole; a click in a legend hides a curve."


def page(runs: Sequence[Run], scaling_rows: Sequence[Line] = ()) -> str:
    """**Local.** The whole page, as HTML."""
    sections = {
        "Training": curves(runs),
        "Checkpoints": checkpoints(runs),
        "Memory": memory(runs),
        "Scaling": scaling(list(scaling_rows)) if scaling_rows else [],
    }
    drawings: dict[str, Figure] = {}
    body = "".join(_section(title, figures, drawings) for title, figures in sections.items() if figures)
    details = "".join(f"{tables.events(run)}{tables.saves(run)}" for run in runs) + tables.settings(runs)
    title = ", ".join(run.name for run in runs)
    now = datetime.now(timezone.utc)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<title>{html.escape(title)}: training report</title>\n<link rel="icon" href="data:,">',
            f"<style>\n{_resource('report.css')}</style>\n</head>\n<body>",
            f"<header><h1>{html.escape(title)}</h1>",
            f"<p>Training report of {now:%Y-%m-%d %H:%M} UTC{_faults(runs)}. {_HOW}</p></header>",
            f"<main>{tables.glance(runs)}{body}<h2>In detail</h2>{details}</main>",
            "<footer>Written by mpi_ckpt; drawn with plotly. Nothing on this page comes from the network.</footer>",
            "<noscript><p>The figures need JavaScript.</p></noscript>",
            f'<script type="application/json" id="figures">{_data(drawings)}</script>',
            f"<script>{get_plotlyjs()}</script>\n<script>\n{_resource('report.js')}</script>\n</body>\n</html>\n",
        ]
    )


def _section(title: str, figures: Sequence[Figure], drawings: dict[str, Figure]) -> str:
    """A heading and its figures, which are added to `drawings` by the id of their place."""
    places = []
    for figure in figures:
        name = f"figure-{len(drawings) + 1}"
        drawings[name] = figure
        heading, note = html.escape(figure.title), html.escape(figure.note)
        label = f'role="img" aria-labelledby="{name}-title" aria-describedby="{name}-note"'
        places.append(
            f'<figure{" class=wide" if figure.wide else ""}><figcaption><h3 id="{name}-title">{heading}</h3>'
            f'<p id="{name}-note">{note}</p></figcaption><div class="drawing" id="{name}" {label}></div></figure>'
        )
    return f'<h2>{title}</h2><div class="figures">{"".join(places)}</div>'


def _data(drawings: dict[str, Figure]) -> str:
    """The drawings as JSON that no HTML parser finds a tag in."""
    documents = {name: json.loads(figure.drawing.to_json()) for name, figure in drawings.items()}
    return json.dumps(documents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _faults(runs: Sequence[Run]) -> str:
    """What could not be read, in words."""
    faults = [(run.name, run.reader.file.unreadable) for run in runs if run.reader.file.unreadable]
    return "".join(
        f". In {html.escape(name)}, {n} line{'s' * (n != 1)} could not be read and do not count" for name, n in faults
    )


def _resource(name: str) -> str:
    return resources.files("mpi_ckpt.tools").joinpath(name).read_text(encoding="utf-8")
