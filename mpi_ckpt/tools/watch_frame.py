"""What `watch` shows: one frame of a run, as rich draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.tools import text
from mpi_ckpt.tools.history import History
from mpi_ckpt.tools.locate import size_of_files
from mpi_ckpt.tools.metrics_file import details, number, step_of
from mpi_ckpt.tools.run_reader import RunReader

_EVENTS = 6  # that are shown
_SPARK_STEPS = 480  # that the sparkline is of
_QUIET_SECONDS = 60.0  # without a line: more than a step or a save takes, usually
_BAD = {"rollback": "red", "damage": "red", "hang": "red", "preemption": "yellow", "injection": "yellow"}


def frame(reader: RunReader, now: float) -> RenderableType:
    """**Local.** The run as it is at `now`, in seconds since 1970. Reads the checkpoints' directory."""
    history = reader.history
    title = Text(reader.run_dir.resolve().name, style="bold")
    if not history.last:
        return Group(title, Text(f"waiting for {reader.file.path}", style="dim"))
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(ratio=1)
    for label, shown in _training(reader, now) + _checkpoints(reader, now):
        lines.add_row(label, shown)
    title.append_text(_state(history, now))
    return Group(title, _progress(reader), Text(), lines, Text(), _events(history, now))


class Sparkline:
    """Values as a row of bars as wide as there is room; every bar is the mean of as many values."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = [value for value in values if math.isfinite(value)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        bars = "_.-=+*%#" if options.ascii_only else "▁▂▃▄▅▆▇█"
        size = max(1, -(-len(self._values) // min(60, options.max_width)))
        means = [fmean(self._values[i : i + size]) for i in range(0, len(self._values), size)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (len(bars) - 1) / (high - low) if high > low else 0.0
        yield Text("".join(bars[round((mean - low) * scale)] for mean in means), style="cyan", no_wrap=True)


def eta(reader: RunReader) -> float:
    """Seconds until the run's last step at the pace of the last steps, stalls included; NaN where none can say."""
    rows, curve = reader.history.recent, reader.history.curve
    if not rows or not reader.steps:
        return math.nan
    took = number(rows[-1], "time") - number(rows[0], "time")
    steps = (step_of(rows[-1]) or 0) - (step_of(rows[0]) or 0)
    pace = took / steps if steps > 0 and took > 0 else median(number(row, "step_seconds") for row in rows)
    return max(0, reader.steps - curve.steps[-1]) * pace


def _state(history: History, now: float) -> Text:
    quiet = now - number(history.last, "time")
    ranks = f"  {history.ranks:.0f} ranks" if math.isfinite(history.ranks) else ""
    if history.outcome:
        state, style = history.outcome, "green" if history.outcome in ("finished", "stop-at") else "yellow"
        state = "stopped at a step, as asked" if state == "stop-at" else state
    elif quiet > _QUIET_SECONDS:
        state, style = f"no line for {text.duration(quiet)}: killed, or in a long step", "yellow"
    else:
        state, style = "running", "green"
    return Text.assemble((ranks, "dim"), "  ", (state, style))


def _progress(reader: RunReader) -> RenderableType:
    curve = reader.history.curve
    step = curve.steps[-1] if len(curve) else 0
    total = reader.steps
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    if not total:
        bar.add_row(Text(f"step {step:,}"))
        return bar
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True, justify="right")
    left = eta(reader)
    ends = f"{step / total:.0%}"
    if math.isfinite(left) and step < total and not reader.history.outcome:
        ends += f"  {text.duration(left)} to go"
    bar.add_row(Text(f"step {step:,} of {total:,}"), ProgressBar(total=total, completed=step), Text(ends))
    return bar


def _training(reader: RunReader, now: float) -> list[tuple[str, RenderableType]]:
    history = reader.history
    curve = history.curve
    if not len(curve):
        return [("loss", Text("no step yet"))]
    loss, lr, norm = (curve[name][-1] for name in ("loss", "lr", "grad_norm"))
    spark = curve["loss"][-_SPARK_STEPS:]
    rows: list[tuple[str, RenderableType]] = [
        ("loss", Text(f"{loss:.4f}" if math.isfinite(loss) else "not finite", style="bold")),
        ("", Sparkline(spark)),
        ("", Text(f"the last {len(spark):,} steps", style="dim")),
    ]
    if history.evaluations:
        step = max(history.evaluations)
        rows.append(("evaluation", Text(f"{number(history.evaluations[step], 'eval_loss'):.4f} at step {step:,}")))
    rows.append(("lr", Text(f"{lr:.3g}" + (f"   gradient norm {norm:.3g}" if math.isfinite(norm) else ""))))
    seconds, speed = (_recent(history, name) for name in ("step_seconds", "tokens_per_second"))
    pace = [f"{speed:,.0f} tokens/s"] * math.isfinite(speed) + [f"{seconds * 1e3:,.3g} ms a step"] * math.isfinite(
        seconds
    )
    return [*rows, ("speed", Text("   ".join(pace) or "?"))]


def _recent(history: History, name: str) -> float:
    values = [value for row in history.recent if math.isfinite(value := number(row, name))]
    return median(values) if values else math.nan


def _checkpoints(reader: RunReader, now: float) -> list[tuple[str, RenderableType]]:
    root, history = reader.run_dir / "checkpoints", reader.history
    rows: list[tuple[str, RenderableType]] = []
    save = history.newest_committed()
    if save:
        said = [f"step {save.step:,}"]
        said += [f"committed {text.duration(now - save.committed)} ago"] * math.isfinite(save.committed)
        said += [text.size(int(save.nbytes))] * math.isfinite(save.nbytes)
        said += [f"stall {save.stall_seconds * 1e3:.3g} ms"] * math.isfinite(save.stall_seconds)
        rows.append(("checkpoint", Text("   ".join(said))))
    else:
        rows.append(("checkpoint", Text(_on_disk(reader))))
    flying = history.in_flight()
    if flying and not history.outcome:
        written = size_of_files(names.step_dir(root, flying.step))
        said = [f"step {flying.step:,}"]
        said += [f"{min(1.0, written / flying.nbytes):.0%} of {text.size(int(flying.nbytes))}"] * (flying.nbytes > 0)
        said += [f"since {text.duration(now - flying.staged)}"] * math.isfinite(flying.staged)
        rows.append(("saving", Text("   ".join(said), style="cyan")))
    return rows


def _on_disk(reader: RunReader) -> str:
    """The newest step that lies there, for a log that says nothing of it."""
    try:
        directory = find_committed(reader.run_dir / "checkpoints", None)
        manifest = read_manifest(directory)
    except (CheckpointError, OSError):  # none, or one that is pruned just now
        return "none yet"
    return f"step {manifest.step:,}   committed {text.age(manifest.created)} ago"


def _events(history: History, now: float) -> Table:
    rows = []
    for line in history.events[-_EVENTS:]:
        step, ago = step_of(line), now - number(line, "time")
        when = f"{text.duration(ago)} ago" if math.isfinite(ago) else ""
        where = "" if step is None else f"step {step:,}"
        rows.append((when, where, str(line["event"]), details(line)))
    table = Table.grid(padding=(0, 2))
    for i in range(3):
        width = max((len(row[i]) for row in rows), default=0)  # else long details would take these columns' room
        table.add_column(justify="right" if i < 2 else "left", no_wrap=True, min_width=width)
    table.add_column(style="dim", no_wrap=True, overflow="ellipsis")
    for when, where, event, about in rows:
        table.add_row(Text(when, style="dim"), where, Text(event, style=_BAD.get(event, "")), Text(about))
    return table
