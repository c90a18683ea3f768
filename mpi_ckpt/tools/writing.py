"""One process that changes a checkpoints root: under the writer's lock, in the order of the commit protocol.

    lock      no other writer, and leftovers cleaned
    write     every shard: rankNNNNN.h5.tmp, data, fsync, rename, fsync of the directory
    commit    is the lock still ours? then manifest.json by rename, fsync of the directory

A step exists if and only if its manifest does, so a crash before the last line leaves garbage that the next writer
cleans, and a failure is undone backwards.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import steps, values
from mpi_ckpt.checkpoint.documents import Document
from mpi_ckpt.errors import SaveFailed, StepExists
from mpi_ckpt.storage import atomic, lock, names
from mpi_ckpt.storage.manifest import (
    ArrayRecord,
    ShardManifest,
    ShardRecord,
    build_manifest,
    read_manifest,
    write_manifest,
)
from mpi_ckpt.storage.shard_file import BlockToWrite, ShardAttributes, write_shard


@dataclass(frozen=True)
class NewStep:
    """A step to be written for `world_size` ranks: what its manifest says beside the shards, and `nbytes` of arrays.

    `contents(rank)` gives the blocks and the values' document of a rank's shard; it is asked once, rank by rank.
    """

    step: int
    world_size: int
    nbytes: int
    arrays: dict[str, ArrayRecord]
    contents: Callable[[int], tuple[Sequence[BlockToWrite], Document]]
    index: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    wall_clock_seconds: float = 0.0


@contextlib.contextmanager
def writing(root: Path) -> Iterator[str]:
    """**Local.** Hold the writer's lock of `root`; gives the launch id. Raises DirectoryInUse beside another writer."""
    launch_id = secrets.token_hex(8)
    held = lock.WriterLock(root, launch_id)
    try:
        yield launch_id
    finally:
        held.release()


def write_step(root: Path, new: NewStep) -> Path:
    """**Local.** Commit `new` below the checkpoints root `root`, made if need be; returns the step's directory.

    Raises StepExists, DirectoryInUse, SaveFailed for want of room, OSError, and what reading the contents raises; no
    file of the step is left then.
    """
    atomic.make_dir(root)
    directory = names.step_dir(root, new.step)
    with writing(root) as launch_id:
        _check_free(directory)
        check_room(root, new.nbytes, f"write step {new.step}")
        steps.clean(root)
        atomic.make_dir(directory)
        save_id = names.new_save_id()
        suffix = save_id if names.own_files(directory) else None  # beside a step that was set aside
        written: list[ShardRecord] = []
        try:
            for rank in range(new.world_size):
                blocks, document = new.contents(rank)
                path = directory / names.shard_name(rank, suffix)
                attributes = ShardAttributes(save_id, rank, new.world_size, new.step)
                written.append(write_shard(names.tmp(path), blocks, values.dumps(document), attributes))
                atomic.publish(names.tmp(path), path)
            lock.check_owner(root, launch_id)
            _commit(directory, new, save_id, written)
        except BaseException:
            _withdraw(directory, suffix)
            raise
    return directory


def is_there(directory: Path, manifest: ShardManifest) -> bool:
    """**Local.** Whether this very save is committed. Raises StepExists where another save of the step is."""
    if not steps.is_committed(directory):
        return False
    here = read_manifest(directory)
    if here.save_id != manifest.save_id:
        raise StepExists(
            "another save of the step is committed here already",
            path=directory,
            found=f"save {here.save_id} of {here.created}",
            expected=f"save {manifest.save_id} of {manifest.created}, or nothing",
            action="Write to another directory.",
        )
    return True


@contextlib.contextmanager
def committing(root: Path, launch_id: str, manifest: ShardManifest) -> Iterator[Path]:
    """**Local.** Room and an empty directory for the shards of a step that was saved elsewhere, which the body puts
    there under the manifest's names; then the manifest. No file of the step is left when anything fails."""
    directory = names.step_dir(root, manifest.step)
    check_room(root, sum(shard.nbytes for shard in manifest.shards), f"write step {manifest.step}")
    steps.clean(root)
    atomic.make_dir(directory)
    try:
        yield directory
        lock.check_owner(root, launch_id)
        write_manifest(directory, manifest)
    except BaseException:
        paths = [directory / shard.path for shard in manifest.shards]
        atomic.remove(names.manifest_path(directory), missing_ok=True)
        atomic.remove(*paths, *map(names.tmp, paths), missing_ok=True)
        raise
    steps.remove_unlisted(directory)  # what a restore had set aside there as damaged


def _check_free(directory: Path) -> None:
    if steps.is_committed(directory):
        raise StepExists(
            "the step is committed already",
            path=directory,
            expected="a step that does not exist",
            action="Write to another directory, or another step.",
        )


def check_room(place: Path, nbytes: int, what: str) -> None:
    """**Local.** Raise SaveFailed unless the disk of the directory `place` has room for `nbytes`."""
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise SaveFailed(
            f"not enough room on the disk to {what}",
            path=place,
            found=f"{free} bytes free",
            expected=f"at least {nbytes} bytes",
            action="Free some space, or write to another disk.",
        )


def _commit(directory: Path, new: NewStep, save_id: str, written: list[ShardRecord]) -> None:
    manifest = build_manifest(
        written,
        step=new.step,
        save_id=save_id,
        arrays=new.arrays,
        index=new.index,
        meta=new.meta,
        metrics=new.metrics,
        environment=new.environment,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        wall_clock_seconds=new.wall_clock_seconds,
    )
    write_manifest(directory, manifest)


def _withdraw(directory: Path, suffix: str | None) -> None:
    """Backwards: what readers see goes first. What cannot be removed is garbage for the next writer."""
    manifest = names.manifest_path(directory)
    with contextlib.suppress(OSError):
        atomic.remove(manifest, names.tmp(manifest), missing_ok=True)
        atomic.remove(*(path for path in names.own_files(directory) if suffix is None or suffix in path.name))
        atomic.remove_dir(directory)
