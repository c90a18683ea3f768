"""The report's words and numbers as HTML: what a run is at a glance, its checkpoints, its events, its settings."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from statistics import median
from typing import Any

from mpi_ckpt.tools import text
from mpi_ckpt.tools.history import Save
from mpi_ckpt.tools.metrics_file import details, number, step_of, words
from mpi_ckpt.tools.report_style import Run

_MOST_ROWS = 500  # of a table, the newest
_DASH = "–"


def glance(runs: Sequence[Run]) -> str:
    """The runs in a few numbers: tiles for one, a table for several."""
    rows = [(label, [value(run) for run in runs]) for label, value in _GLANCE.items()]
    rows = [(label, values) for label, values in rows if any(value != _DASH for value in values)]
    if len(runs) == 1:
        tiles = "".join(f"<div><dt>{label}</dt><dd>{html.escape(values[0])}</dd></div>" for label, values in rows)
        return f'<dl class="tiles">{tiles}</dl>'
    names = [f'<span class="key key-{run.number % 8}"></span>{html.escape(run.name)}' for run in runs]
    cells = [[label, *map(html.escape, values)] for label, values in rows]
    return f'<div class="glance">{table("At a glance", ["", *names], cells)}</div>'


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table of HTML cells that scrolls in its own box; the columns `left` to the left, numbers to the right."""

    def line(cells: Sequence[str], tag: str) -> str:
        sides = (' class="word"' if i in left else "" for i in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{side}>{c}</{tag}>" for c, side in zip(cells, sides, strict=True)) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
    return f"{box}<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table></div>"


def events(run: Run) -> str:
    """All that happened but steps, saves, evaluations and the account of memory."""
    history = run.reader.history
    shown = history.events[-_MOST_ROWS:]
    rows = [
        [
            _dash_or(step_of(line), "{:,}"),
            _state_word(line["event"]),
            f'<span class="long">{html.escape(details(line))}</span>',
            _elapsed(number(line, "time") - history.began),
            _clock(number(line, "time")),
        ]
        for line in shown
    ]
    note = _newest(len(shown), len(history.events))
    header = ["step", "event", "details", "since begin", "time (UTC)"]
    return _titled("Events", run, note, table("Events", header, rows, left=(1, 2)))


def saves(run: Run) -> str:
    """Every save with its times and sizes, the newest first."""
    history = run.reader.history
    shown = history.saves[: -_MOST_ROWS - 1 : -1]
    if not shown:
        return ""
    header = ["step", "state", "bytes", "stall, ms", "write, s", "commit, s", "MB/s a rank"]
    header += ["staged (UTC)", "ended (UTC)"]
    note = _newest(len(shown), len(history.saves))
    content = table("Checkpoints", header, map(_save_row, shown), left=(1,))
    return _titled("Checkpoints", run, note, content)


def settings(runs: Sequence[Run]) -> str:
    """What the runs were started with; one row differs where the runs do."""
    flat = [_flat(run.reader.settings) for run in runs]
    names = list(dict.fromkeys(name for found in flat for name in found))
    if not names:
        return ""
    rows = []
    for name in names:
        values = [html.escape(found.get(name, _DASH)) for found in flat]
        differs = len(set(values)) > 1
        rows.append([html.escape(name), *(f"<strong>{value}</strong>" if differs else value for value in values)])
    header = ["setting", *(html.escape(run.name) if len(runs) > 1 else "value" for run in runs)]
    note = "Values that differ are bold." if len(runs) > 1 else ""
    return _details_box("Settings", note, table("Settings", header, rows))


def _save_row(save: Save) -> list[str]:
    return [
        f"{save.step:,}",
        _state_word(save.state),
        _dash_or(save.nbytes, "{:,.0f}"),
        _dash_or(save.stall_seconds * 1e3, "{:,.3g}"),
        _dash_or(save.write_seconds, "{:.4g}"),
        _dash_or(save.commit_seconds, "{:.4g}"),
        _dash_or(save.rate / 1e6, "{:,.4g}"),
        _clock(save.staged),
        _clock(save.gone),
    ]


def _state_word(word: str) -> str:
    """A word that the style sheet may colour."""
    return f'<span class="event-{html.escape(word.split(" ")[-1], quote=True)}">{html.escape(word)}</span>'


def _titled(title: str, run: Run, note: str, content: str) -> str:
    return _details_box(f"{title}: {html.escape(run.name)}", note, content)


def _details_box(title: str, note: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{f'<p class=note>{note}</p>' if note else ''}{content}</details>"


def _newest(shown: int, total: int) -> str:
    return "" if shown == total else f"The newest {shown:,} of {total:,}."


def _flat(settings: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        found |= _flat(value) if isinstance(value, dict) else {str(name): words(value)}
    return found


def _dash_or(value: float | None, form: str) -> str:
    return _DASH if value is None or not math.isfinite(value) else form.format(value)


def _clock(seconds: float) -> str:
    if not 0 <= seconds < 253_402_300_800:  # the year 10000: no date beyond it
        return _DASH
    then = datetime.fromtimestamp(seconds, timezone.utc)
    return f'<time datetime="{then.isoformat()}">{then:%Y-%m-%d %H:%M:%S}</time>'


def _elapsed(seconds: float) -> str:
    return text.duration(seconds) if math.isfinite(seconds) else _DASH


# -- at a glance -----------------------------------------------------------------------------------------------------


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _state(run: Run) -> str:
    history = run.reader.history
    names = {"finished": "finished", "stop-at": "stopped at a step, as asked", "": "no end in the log"}
    return names.get(history.outcome, history.outcome)


def _step(run: Run) -> str:
    curve, total = run.reader.history.curve, run.reader.steps
    step = curve.steps[-1] if len(curve) else 0
    return f"{step:,} of {total:,}" if total else f"{step:,}"


def _loss(run: Run) -> str:
    losses = _finite(run.reader.history.curve["loss"])
    return f"{losses[-1]:.4f}" if losses else _DASH


def _evaluation(run: Run) -> str:
    found = run.reader.history.evaluations
    return _dash_or(number(found[max(found)], "eval_loss"), "{:.4f}") if found else _DASH


def _middle(column: str, form: str, scale: float = 1.0) -> Callable[[Run], str]:
    def value(run: Run) -> str:
        values = _finite(run.reader.history.curve[column])
        return form.format(median(values) * scale) if values else _DASH

    return value


def _communication(run: Run) -> str:
    curve = run.reader.history.curve
    both = [(c, s) for c, s in zip(curve["communication_seconds"], curve["step_seconds"], strict=True) if c >= 0 < s]
    return f"{sum(c for c, _ in both) / sum(s for _, s in both):.1%}" if both else _DASH


def _stall(run: Run) -> str:
    history = run.reader.history
    stalls = _finite(save.stall_seconds for save in history.saves)
    steps = [s for curve in (history.curve, *history.abandoned) for s in _finite(curve["step_seconds"])]
    return f"{sum(stalls) / (sum(stalls) + sum(steps)):.2%}" if stalls and sum(steps) else _DASH


def _checkpoints(run: Run) -> str:
    committed = sum(math.isfinite(s.commit_seconds) or s.state == "committed" for s in run.reader.history.saves)
    sizes = _finite(save.nbytes for save in run.reader.history.saves)
    return f"{committed:,} × {text.size(int(sizes[-1]))}" if sizes else _DASH


def _interruptions(run: Run) -> str:
    history = run.reader.history
    counts = {"launch": history.launches, "rollback": history.count("rollback")}
    counts["preemption"] = history.count("preemption")
    words = [f"{n} {word}{('es' if word == 'launch' else 's') * (n != 1)}" for word, n in counts.items() if n]
    return ", ".join(words) or _DASH


def _resident(run: Run) -> str:
    resident = _finite(run.reader.history.memory.get("resident", []))
    return text.size(int(max(resident))) if resident else _DASH


_GLANCE: dict[str, Callable[[Run], str]] = {
    "State": _state,
    "Step": _step,
    "Loss, nats a token": _loss,
    "Evaluation loss": _evaluation,
    "Tokens a second, median": _middle("tokens_per_second", "{:,.0f}"),
    "Step time, median": _middle("step_seconds", "{:,.3g} ms", 1e3),
    "Communication, of the step time": _communication,
    "Checkpoint stalls, of the time": _stall,
    "Checkpoints committed": _checkpoints,
    "Ranks": lambda run: _dash_or(run.reader.history.ranks, "{:,.0f}"),
    "Memory a rank, resident, max": _resident,
    "History": _interruptions,
}
