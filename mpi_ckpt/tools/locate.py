"""From what a user names on the command line to the checkpoints root, or the step, that is meant."""

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


def new_root(place: Path) -> Path:
    """**Local.** The checkpoints root to write to: that of a run directory if `place` is one, else `place` itself."""
    return place / "checkpoints" if (place / "checkpoints").is_dir() else place


def committed_step(root: Path, step: int | None) -> Path:
    """**Local.** The directory of `step` (None: the newest) below a checkpoints root. Raises NoCheckpoint."""
    steps = names.list_steps(root)
    if not steps or (step is not None and step not in steps):
        raise NoCheckpoint(
            "there is no committed step" if step is None else f"step {step} is not committed",
            path=root,
            found=f"steps {_listed(steps)}" if steps else "no committed step",
            expected="a committed step" if step is None else f"step {step}",
            action="Look with `python -m mpi_ckpt ls`.",
        )
    return names.step_dir(root, steps[-1] if step is None else step)


def step_of(text: str) -> Path:
    """**Local.** The committed step that `text` names: a step's directory, RUN_DIR (its newest), or RUN_DIR:STEP.

    Raises NoCheckpoint.
    """
    place = Path(text)
    step = names.parse_step(place.resolve().name)
    if step is not None and place.is_dir():
        return committed_step(place.resolve().parent, step)
    run_dir, colon, number = text.rpartition(":")
    if colon and number.isdecimal() and not place.exists():
        return committed_step(checkpoints_root(Path(run_dir)), int(number))
    return committed_step(checkpoints_root(place), None)


def _listed(steps: list[int]) -> str:
    """The steps in words, a long list by its ends."""
    if len(steps) > 12:
        return f"{', '.join(map(str, steps[:3]))}, ... {', '.join(map(str, steps[-3:]))} ({len(steps)} steps)"
    return ", ".join(map(str, steps))
