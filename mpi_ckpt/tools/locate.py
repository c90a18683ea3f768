"""From what a user names on the command line to the checkpoints root that is meant."""

from __future__ import annotations

from pathlib import Path

from mpi_ckpt.errors import NoCheckpoint
from mpi_ckpt.storage import names


def checkpoints_root(place: Path) -> Path:
    """**Local.** The checkpoints root of a run directory, or `place` itself if it holds steps.

    Raises NoCheckpoint when it is neither.
    """
    for root in (place / "checkpoints", place):
        if names.list_steps(root) or names.list_uncommitted(root):
            return root
    raise NoCheckpoint(
        "there are no checkpoints here",
        path=place,
        found="no step_NNNNNNNN directory in it, nor in a `checkpoints` directory below it",
        expected="a run's directory, or the directory of its checkpoints",
        action="Name the --run-dir of the training command, or the root given to Checkpointer.",
    )
