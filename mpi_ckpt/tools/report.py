"""`report`: what happened in one or several runs, as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import atomic
from mpi_ckpt.tools import status
from mpi_ckpt.tools.run_reader import RunReader

HELP = "draw a run, or several over each other, as one HTML page"
DESCRIPTION = """Write one HTML page that needs no network: losses and learning rate across restarts, step time with the
stalls of checkpoints, the life of every checkpoint, memory a rank, events, settings. Several runs are drawn over each
other. Reads metrics.jsonl and run.json of each RUN_DIR; a run may go on meanwhile.

Of steps that were trained more than once the last attempt counts; those that a resume or a rollback has taken back are
drawn faintly. Of long runs the lowest and the highest value of every bucket of steps are drawn, and the page says so.

Needs plotly: pip install plotly."""
EXAMPLE = "python -m mpi_ckpt report runs/demo runs/other --out report.html"


def read_runs(run_dirs: list[Path]) -> dict[str, RunReader]:
    """**Local.** Each run by the name it is called in the report. Raises NothingRecorded, CheckpointError, OSError."""
    found: dict[str, RunReader] = {}
    plain = [run_dir.resolve().name for run_dir in run_dirs]
    for run_dir, name in zip(run_dirs, plain, strict=True):
        reader = RunReader(run_dir)
        reader.require()
        found[name if plain.count(name) == 1 else str(run_dir)] = reader
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="a run's directory")
    out = "where the page goes (default: report.html in the first RUN_DIR)"
    parser.add_argument("--out", metavar="FILE", type=Path, help=out)
    scaling = "add the result of benchmarks/train_scaling.py --json FILE"
    parser.add_argument("--scaling", metavar="FILE", type=Path, help=scaling)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Write the page; the exit status."""
    try:
        from mpi_ckpt.tools.report_page import page
        from mpi_ckpt.tools.report_scaling import read_scaling
        from mpi_ckpt.tools.report_style import Run
    except ModuleNotFoundError as error:
        if error.name != "plotly":
            raise
        raise CheckpointError(
            "the figures cannot be drawn without plotly",
            found="it is not installed",
            action="Install it: pip install plotly.",
        ) from error
    readers = read_runs(arguments.run_dirs)
    runs = [Run(name, reader, number) for number, (name, reader) in enumerate(readers.items())]
    rows = read_scaling(arguments.scaling) if arguments.scaling else []
    out = arguments.out or arguments.run_dirs[0] / "report.html"
    atomic.write_file(out, page(runs, rows).encode())
    print(out)
    return status.WELL
