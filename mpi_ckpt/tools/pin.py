"""`pin` and `unpin`: whether retention may delete a step."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.errors import NoCheckpoint
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import checkpoints_root

HELP = "keep a step for good: no retention deletes it, and it does not count"
DESCRIPTION = """Mark a committed step with a file `pinned` in its directory. Retention, of a running job and of
`prune`, never deletes it, and it does not count among the steps to keep; going back to a step before it, by
--discard-later or a rollback, does delete it. Works beside a running job; pinning twice is fine."""
EXAMPLE = "python -m mpi_ckpt pin runs/demo 20"


def pin(directory: Path) -> None:
    """**Local.** Pin a committed step, durably. Raises NoCheckpoint if it is pruned at this moment."""
    with contextlib.suppress(FileNotFoundError):  # the directory has gone: the error below
        atomic.write_file(directory / names.PINNED, b"")
    if not steps.is_committed(directory):
        if directory.is_dir():
            atomic.remove(directory / names.PINNED, missing_ok=True)
        raise NoCheckpoint(
            "the step was pruned before it could be pinned",
            path=directory,
            found="no manifest",
            expected="a committed step",
            action="Pin another step.",
        )


def unpin(directory: Path) -> None:
    """**Local.** Let retention decide on a step again, durably."""
    atomic.remove(directory / names.PINNED, missing_ok=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of both verbs."""
    text.add_run_dir(parser)
    parser.add_argument("step", metavar="STEP", type=text.natural, help="a committed step")


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Pin; the exit status."""
    pin(find_committed(checkpoints_root(arguments.run_dir), arguments.step))
    print(f"step {arguments.step} is pinned")
    return status.WELL
