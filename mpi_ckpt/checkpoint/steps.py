"""A step's directory as a whole: what state it is in, and how it goes away.

Deleting runs backwards: the manifest first and durably, so that from then on the step is no checkpoint to anyone,
whatever happens to the rest. A directory without a manifest is garbage; files that are not ours stay where they are.
"""

from __future__ import annotations

import errno
import logging
import shlex
from collections.abc import Container
from pathlib import Path

from mpi_ckpt.errors import CheckpointError, NoCheckpoint
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import read_manifest

logger = logging.getLogger(__name__)


def find_committed(root: Path, step: int | None) -> Path:
    """**Local.** The directory of the committed `step` (None: the newest) below `root`. Raises NoCheckpoint."""
    committed = names.list_steps(root)
    if not committed or (step is not None and step not in committed):
        raise NoCheckpoint(
            "there is no committed step" if step is None else f"step {step} is not committed",
            path=root,
            found=f"steps {_in_words(committed)}" if committed else "no committed step",
            expected="a committed step" if step is None else f"step {step}",
            action=f"Look with `python -m mpi_ckpt ls {shlex.quote(str(root))}`.",
        )
    return names.step_dir(root, committed[-1] if step is None else step)


def _in_words(steps: list[int]) -> str:
    """The steps, of a long list its ends."""
    if len(steps) <= 12:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[:3]))} ... {', '.join(map(str, steps[-3:]))}, {len(steps)} in all"


def is_committed(directory: Path) -> bool:
    """**Local.** Whether the step exists: it does if and only if its manifest does."""
    return names.manifest_path(directory).exists()


def is_pinned(directory: Path) -> bool:
    """**Local.** Whether the step is marked to stay."""
    return (directory / names.PINNED).exists()


def is_set_aside(directory: Path) -> bool:
    """**Local.** Whether the step was found damaged and taken out of the count."""
    return (directory / names.DAMAGED_MANIFEST).exists() and not is_committed(directory)


def list_set_aside(root: Path) -> list[int]:
    """**Local.** The steps that were set aside as damaged, in ascending order."""
    return [step for step in names.list_uncommitted(root) if is_set_aside(names.step_dir(root, step))]


def set_aside(directory: Path) -> None:
    """**Local.** Take a damaged step out of the count, reversibly: its manifest gets another name."""
    atomic.publish(directory / names.MANIFEST, directory / names.DAMAGED_MANIFEST)


def delete(directory: Path) -> None:
    """**Local.** Delete a step, committed or not. Raises OSError; the manifest is gone first in any case."""
    manifest = names.manifest_path(directory)
    if manifest.exists():
        atomic.remove(manifest)
    atomic.remove(*names.own_files(directory), missing_ok=True)
    try:
        atomic.remove_dir(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def clean(root: Path, spared: Container[int] = ()) -> None:
    """**Local.** Delete what crashed launches left behind. What cannot be deleted is logged and left.

    `spared` are steps that are committed although their manifest lies elsewhere.
    """
    for step in names.list_uncommitted(root):
        directory = names.step_dir(root, step)
        if step in spared or is_set_aside(directory):
            continue
        try:
            if names.own_files(directory) or not any(directory.iterdir()):
                logger.info("cleaning %s: it was never committed", directory)
                delete(directory)
        except OSError as error:
            logger.warning("cannot clean %s, going on: %s", directory, error)


def clean_committed(root: Path) -> None:
    """**Local.** Delete from committed steps what a crash in the middle of an overwrite left there.

    Looks into every step, so it is for the beginning of a launch.
    """
    for step in names.list_steps(root):
        directory = names.step_dir(root, step)
        # A step that was never saved again has plain names only; its manifest, which may be long, need not be read.
        if any("-" in path.name or path.name.endswith(names.TMP_SUFFIX) for path in names.own_files(directory)):
            remove_unlisted(directory)


def remove_unlisted(directory: Path) -> None:
    """**Local.** Delete own files that the manifest of a committed step does not list, which an overwrite has replaced.

    What cannot be deleted, or judged, is logged and left.
    """
    try:
        listed = {shard.path for shard in read_manifest(directory).shards} | {names.MANIFEST, names.PINNED}
        atomic.remove(
            *(path for path in names.own_files(directory) if names.protected(path.name) not in listed), missing_ok=True
        )
    except (OSError, CheckpointError) as error:
        logger.warning("cannot remove files that %s does not list, going on: %s", directory.name, error)
