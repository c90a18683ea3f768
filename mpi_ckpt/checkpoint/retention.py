"""Which committed steps have to go: decided by a pure function, done by a thin one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from mpi_ckpt.checkpoint import steps as step_directories
from mpi_ckpt.storage import names

logger = logging.getLogger(__name__)


def choose(steps: Sequence[int], *, keep: int | None, kept: frozenset[int] = frozenset()) -> list[int]:
    """The steps to delete, oldest first, so that the newest `keep` of the rotating ones stay.

    `kept` are steps that do not rotate: pinned, or held because the run was restored from them. None keeps everything.
    """
    if keep is None:
        return []
    rotating = sorted(set(steps) - kept)
    return rotating[: max(0, len(rotating) - keep)]


def prune(root: Path, doomed: Sequence[int]) -> list[int]:
    """**Local.** Delete steps and return those that are gone; one that cannot be deleted is logged and left.

    The manifest goes first: once deletion has begun, the step is no checkpoint any more, whatever happens.
    """
    gone = []
    for step in doomed:
        directory = names.step_dir(root, step)
        try:
            step_directories.delete(directory)
        except OSError as error:
            logger.warning("cannot delete step %d, going on: %s", step, error)
        if not step_directories.is_committed(directory):
            gone.append(step)
    return gone
