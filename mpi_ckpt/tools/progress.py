"""A progress bar on stderr where a person watches, and nothing at all elsewhere: in logs, pipes and tests."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(what: str, total_bytes: int | None) -> Iterator[Advance]:
    """Gives a function to call with each number of bytes that is done, of a total or of who knows how many; any thread
    may call it."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    from rich.console import Console  # a tenth of a second, and only terminals need it
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console, both = Console(stderr=True), sys.stdout.isatty()  # lines of a redirected stdout must stay in it
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, redirect_stdout=both) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)
