"""`unpin`: let retention decide on a pinned step again."""

from __future__ import annotations

import argparse

from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.tools import status
from mpi_ckpt.tools.locate import checkpoints_root
from mpi_ckpt.tools.pin import add_arguments, unpin

HELP = "undo `pin`"
DESCRIPTION = """Remove the mark that `pin` made. The step counts among those to keep again, and may be deleted by
the next save or `prune`. A step that is not pinned stays as it is."""
EXAMPLE = "python -m mpi_ckpt unpin runs/demo 20"

__all__ = ["DESCRIPTION", "EXAMPLE", "HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Unpin; the exit status."""
    unpin(find_committed(checkpoints_root(arguments.run_dir), arguments.step))
    print(f"step {arguments.step} is pinned no more")
    return status.WELL
