"""`watch`: a running job, live in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from mpi_ckpt.tools import status
from mpi_ckpt.tools.run_reader import RunReader
from mpi_ckpt.tools.watch_frame import frame

HELP = "follow a running job in the terminal"
DESCRIPTION = """Show a run while it goes on: steps and the time that is left, loss, learning rate, speed, the last
checkpoint and the one that is being written, events. Only the run's files are read, so this works from any machine that
sees them, and costs the job nothing.

A run that is not there yet is waited for; one that was killed or preempted may come back, and is waited for as well.
Ends when the run has finished, and on Ctrl-C. With --once, or where the output is no terminal, one frame is printed."""
EXAMPLE = "python -m mpi_ckpt watch runs/demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory")
    parser.add_argument("--once", action="store_true", help="print one frame and exit")
    every = "time between two looks at the files (default: %(default)s)"
    parser.add_argument("--every", metavar="SECONDS", type=_seconds, default=1.0, help=every)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Show the run; the exit status."""
    reader = RunReader(arguments.run_dir)
    console = Console()
    if arguments.once or not sys.stdout.isatty():
        reader.require()
        console.print(frame(reader, time.time()))
        return status.WELL
    reader.refresh()
    with Live(frame(reader, time.time()), console=console, auto_refresh=False) as live:
        while reader.history.outcome != "finished":
            time.sleep(arguments.every)
            reader.refresh()
            live.update(frame(reader, time.time()), refresh=True)
    return status.WELL


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds from 0.05 to 3600")
    return seconds
