"""One process that changes a checkpoints root: under the writer's lock, in the order of the commit protocol.

    lock      no other writer, and leftovers cleaned
    write     every shard: rankNNNNN.h5.tmp, data, fsync
    publish   is the lock still ours? then every shard: rename, fsync of the directory
    commit    is it still? then manifest.json by rename, fsync of the directory

A step exists if and only if its manifest does, so a crash before the last line leaves garbage that the next writer
cleans, and a failure is undone backwards.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import steps, values
from mpi_ckpt.checkpoint.documents import Document
from mpi_ckpt.errors import CorruptShard, InvalidManifest, MissingShard, SaveFailed, StepExists, UnknownSchema
from mpi_ckpt.storage import atomic, lock, names
from mpi_ckpt.storage.manifest import (
    ArrayRecord,
    ShardManifest,
    ShardRecord,
    build_manifest,
    read_manifest,
    write_manifest,
)
from mpi_ckpt.storage.shard_file import BlockToWrite, ShardAttributes, verify_file, write_shard


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
        with committing(root, launch_id, new.step, new.nbytes) as draft:
            save_id = names.new_save_id()
            suffix = save_id if names.own_files(directory) else None  # beside a step that was set aside
            written: list[ShardRecord] = []
            for rank in range(new.world_size):
                blocks, document = new.contents(rank)
                temporary = draft.temporary(names.shard_name(rank, suffix))
                attributes = ShardAttributes(save_id, rank, new.world_size, new.step)
                written.append(write_shard(temporary, blocks, values.dumps(document), attributes))
            draft.commit(_manifest(new, save_id, written))
    return directory


def shards_wanted(
    directory: Path, manifest: ShardManifest, advance: Callable[[int], None] = lambda nbytes: None
) -> list[ShardRecord]:
    """**Local.** The shards of a save that are missing or damaged in the step's directory; all of them where it holds
    no committed step, or one whose manifest is damaged. `advance` is told of the bytes of the others: each is read.

    Raises StepExists where another save of the step is committed, UnknownSchema where a newer version's may be.
    """
    if not steps.is_committed(directory):
        return [*manifest.shards]
    try:
        here = read_manifest(directory)
    except UnknownSchema:
        raise
    except InvalidManifest:  # no restore takes the step for one either
        return [*manifest.shards]
    if here.save_id != manifest.save_id:
        raise StepExists(
            "another save of the step is committed here already",
            path=directory,
            found=f"save {here.save_id} of {here.created}",
            expected=f"save {manifest.save_id} of {manifest.created}, or nothing",
            action="Write to another directory.",
        )
    wanted = []
    for shard in manifest.shards:
        try:
            verify_file(directory / shard.path, shard)
        except (MissingShard, CorruptShard):
            wanted.append(shard)
        else:
            advance(shard.nbytes)
    return wanted


class Draft:
    """A step on its way into `directory`, where older files of it may lie that a restore has set aside as damaged.

    Those are as they were unless the step commits, but for shards of the same name that had to give way just before.
    In a step that is committed it mends this save: what was damaged gives way, and nothing is taken back.
    """

    def __init__(self, root: Path, step: int, launch_id: str) -> None:
        self.directory = names.step_dir(root, step)
        self._root, self._launch_id = root, launch_id
        self._mends = steps.is_committed(self.directory)
        self._shards: list[Path] = []
        self._published: list[Path] = []  # where nothing was

    def temporary(self, name: str) -> Path:
        """Where the shard `name` is written, and has to be durable when the step is committed."""
        self._shards.append(self.directory / name)
        return names.tmp(self._shards[-1])

    def commit(self, manifest: ShardManifest) -> None:
        """**Local.** Give the shards their names, then write the manifest. Raises DirectoryInUse, OSError."""
        lock.check_owner(self._root, self._launch_id)
        for path in self._shards:
            if not os.path.lexists(path):
                self._published.append(path)
            atomic.publish(names.tmp(path), path)
        lock.check_owner(self._root, self._launch_id)
        write_manifest(self.directory, manifest)

    def withdraw(self) -> None:
        """**Local.** Backwards: what readers see goes first. What cannot be removed is garbage for the next writer."""
        manifest = names.manifest_path(self.directory)
        visible, published = ([], []) if self._mends else ([manifest], self._published)
        with contextlib.suppress(OSError):
            atomic.remove(*visible, names.tmp(manifest), missing_ok=True)
            atomic.remove(*published, *map(names.tmp, self._shards), missing_ok=True)
            atomic.remove_dir(self.directory)


@contextlib.contextmanager
def committing(root: Path, launch_id: str, step: int, nbytes: int) -> Iterator[Draft]:
    """**Local.** Room for `nbytes` and a directory for a step that is not committed, or is to be mended; the body
    writes and commits it.

    When anything fails, what was written is removed, and nothing else.
    """
    check_room(root, nbytes, f"write step {step}")
    steps.clean(root)
    draft = Draft(root, step, launch_id)
    atomic.make_dir(draft.directory)
    try:
        yield draft
    except BaseException:
        draft.withdraw()
        raise
    steps.remove_unlisted(draft.directory)  # what a restore had set aside there as damaged


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


def _manifest(new: NewStep, save_id: str, written: Sequence[ShardRecord]) -> ShardManifest:
    return build_manifest(
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
