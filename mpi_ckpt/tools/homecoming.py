"""A step that goes from one place of a run to another: whether both are one run's, and `run.json` along with it.

A run of the trainer is known by its `run.json`; where a place has none, by the settings that its newest step tells of.
Steps and files of other programs tell of neither, and are compared with nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpi_ckpt.errors import InvalidManifest, NoCheckpoint, UnusableOption
from mpi_ckpt.storage import atomic, names, run_file
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.run_file import RUN_FILE, differing, identity, same_run
from mpi_ckpt.tools.locate import has_steps, new_root

logger = logging.getLogger(__name__)


class Settings(NamedTuple):
    """Those of a run of the trainer, and its id, as the file at `place` tells them: see `run_file.identity`."""

    place: str
    values: dict[str, Any]


@dataclass(frozen=True)
class RunFile:
    """A copy of `run.json` that can be read, and where it lies."""

    place: str
    data: bytes

    @property
    def settings(self) -> Settings:
        """What it says of the run."""
        return Settings(self.place, identity(run_file.read(self.data) or {}))


def readable(place: object, data: bytes | None) -> RunFile | None:
    """The copy of `run.json` at `place`; None where there is none, and, with a warning, where it cannot be read."""
    if data is None:
        return None
    if run_file.read(data) is None:
        logger.warning("cannot be read, counts for nothing: %s", place)
        return None
    return RunFile(str(place), data)


def own_run_file(root: Path, copy: RunFile | None) -> RunFile | None:
    """**Local.** `run.json` of the run whose checkpoints root is `root`: it lies in it or, as the trainer's, beside it.

    Raises UnusableOption where it cannot be read; `copy` is one that can, for the user to take.
    """
    for path in (root / RUN_FILE, root.absolute().parent / RUN_FILE):
        if path.is_file():
            data = path.read_bytes()
            if run_file.read(data) is None:
                raise UnusableOption(
                    "the settings of the run cannot be read",
                    path=path,
                    found="no bytes" if not data else f"{len(data)} bytes that say neither settings nor data of a run",
                    expected="the file that the run's first launch wrote",
                    action=f"Copy {copy.place if copy else 'that of the remote tier, or of a node,'} into its place.",
                )
            return RunFile(str(path), data)
    return None


def check_same_run(root: Path, copy: RunFile | None, what: str) -> None:
    """**Local.** Raise UnusableOption, `what`, where `copy` is another run's than the checkpoints root `root`, or its
    own `run.json` cannot be read."""
    own = own_run_file(root, copy) if copy else None
    if own and copy and not same_run(own.data, copy.data):
        raise other_run(what, copy, own)


def other_run(what: str, copy: RunFile, own: RunFile) -> UnusableOption:
    """The error for a `run.json` that speaks of another run than `own`."""
    return UnusableOption(
        what,
        path=copy.place,
        found="other settings or data",
        expected=f"those of {own.place}",
        action=_ACTION,
    )


def is_of_trainer(manifest: ShardManifest) -> bool:
    """Whether the step tells what the trainer's do. Of another program's settings nobody knows what they stand for."""
    return isinstance(manifest.meta.get("settings"), dict) and "cursor" in manifest.meta


def check_settings(manifest: ShardManifest, place: object, known: Iterable[Settings]) -> None:
    """Raise UnusableOption where the step, whose manifest is of `place`, is another run's than any of `known`."""
    if not is_of_trainer(manifest):
        return
    mine = identity(manifest.meta)
    for there, theirs in known:
        if other := differing(mine, theirs):
            raise UnusableOption(
                f"step {manifest.step} is another run's",
                path=place,
                found=other.found,
                expected=f"{other.expected}, as {there} says",
                action=_ACTION,
            )


def check_arrival(manifest: ShardManifest, place: object, root: Path, copy: RunFile | None) -> None:
    """**Local.** Before the step of `place` goes below `root`: raise UnusableOption where it is another run's.

    It has to be of the run that `root` has `run.json` of, else its newest step; and of that of `copy`, the `run.json`
    that comes along with it.
    """
    if not is_of_trainer(manifest):
        return
    own = own_run_file(root, copy)
    there = [own.settings] if own else _newest_below(root)
    check_settings(manifest, place, [*there, *([copy.settings] if copy else [])])


def newest_settings(place: object, steps: Sequence[int], read: Callable[[int], ShardManifest | None]) -> list[Settings]:
    """What the newest of the `steps` (ascending) at `place` that can be read says of its run; [] if nothing."""
    for step in reversed(steps):
        with contextlib.suppress(InvalidManifest, NoCheckpoint):
            if manifest := read(step):
                there = f"{place}/{names.step_name(step)}"
                return [Settings(there, identity(manifest.meta))] if is_of_trainer(manifest) else []
    return []


def _newest_below(root: Path) -> list[Settings]:
    return newest_settings(root, names.list_steps(root), lambda step: read_manifest(names.step_dir(root, step)))


def root_for(run_dir: Path, copy: RunFile | None) -> Path:
    """**Local.** The checkpoints root to write to: a run of the trainer, which has a `run.json`, here or at the other
    side, has its own below the run's directory; that of any other program is `run_dir` itself, unless it has a
    directory `checkpoints`."""
    path = run_dir / RUN_FILE
    if copy is None and not (path.is_file() and run_file.read(path.read_bytes()) is not None):
        return new_root(run_dir)
    return run_dir if _is_root(run_dir) else run_dir / "checkpoints"


def bring_run_file(run_dir: Path, copy: RunFile | None) -> Path | None:
    """**Local.** Put `run.json` into the run's directory; its path, None where it is there, or nowhere to be had."""
    path = run_dir / RUN_FILE
    if copy is None or _is_root(run_dir) or path.exists():
        return None
    atomic.write_file(path, copy.data)
    return path


def _is_root(run_dir: Path) -> bool:
    """Whether it is a checkpoints' own directory, beside which `run.json` has its place, not in it."""
    return run_dir.name == "checkpoints" or has_steps(run_dir)


_ACTION = "Name where the steps of this run lie, or the directory of that one."
