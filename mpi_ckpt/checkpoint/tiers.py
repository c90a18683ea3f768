"""Where steps lie: the directory of the checkpoints, and behind it a remote store. The newest over both counts.

For survival the far tier is asked, for speed the near one: a step is opened by the manifest that is nearest, and each
of its shards is read from the nearest place that has it intact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.errors import CorruptShard, InvalidManifest, MissingShard, NoCheckpoint, RemoteFailed, UnknownSchema
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.places import Directory, RemoteStep
from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest

logger = logging.getLogger(__name__)
T = TypeVar("T")


def tier_of(place: Directory) -> str:
    """Which of the tiers beyond the nodes a place is of."""
    return "shared" if isinstance(place, Path) else "remote"


@dataclass(frozen=True)
class Copies:
    """A step's manifest, and the places where its shards may lie, the nearest first. Travels between ranks.

    `tier` is where the manifest was found: local (the nodes), shared or remote.
    """

    manifest: ShardManifest
    directories: tuple[Directory, ...]
    tier: str = "shared"

    @property
    def directory(self) -> Directory:
        """The nearest, for messages."""
        return self.directories[0]

    @property
    def manifest_path(self) -> str:
        """Where the manifest was read, for messages."""
        name = names.MANIFEST if isinstance(self.directory, Path) else names.UPLOAD_MANIFEST
        return f"{self.directory}/{name}"

    def nearest(self, read: Callable[[Directory], T]) -> T:
        """**Local.** What `read` makes of the nearest place where it finds no damage; its first error if of none."""
        nearest, *others = self.directories
        try:
            return read(nearest)
        except (MissingShard, CorruptShard) as error:
            for directory in others:
                logger.warning("step %d: reading the copy in %s, for %s", self.manifest.step, directory, error)
                try:
                    return read(directory)
                except (MissingShard, CorruptShard, RemoteFailed) as another:
                    logger.warning("step %d: that copy is of no use either: %s", self.manifest.step, another)
            raise


@dataclass(frozen=True)
class Tiers:
    """The directory `root` and, unless it is None, the URL of the remote store behind it."""

    root: Path
    remote: str | None = None

    def list_steps(self) -> list[int]:
        """**Local.** The steps that are committed in either tier, in ascending order.

        A remote store that does not answer is logged and left out where the directory has steps. Raises RemoteFailed
        where it has none: whether there is nothing yet cannot be known then. RemoteRefused in any case.
        """
        near = names.list_steps(self.root)
        if self.remote is None:
            return near
        try:
            return sorted({*near, *committed_remotely(open_store(self.remote))})
        except RemoteFailed as error:
            if not near:
                raise
            logger.warning("going by the local steps alone: %s", error)
            return near

    def open(self, step: int) -> Copies:
        """**Local.** The step by its nearest manifest that is valid. Raises NoCheckpoint, InvalidManifest,
        UnknownSchema, RemoteFailed."""
        directory = names.step_dir(self.root, step)
        if self.remote is None:
            return Copies(read_manifest(directory), (directory,))
        try:
            manifest = read_manifest(directory)
            return Copies(manifest, (directory, RemoteStep(self.remote, step, manifest.save_id)))
        except UnknownSchema:
            raise
        except (NoCheckpoint, InvalidManifest) as error:
            far = read_upload_manifest(open_store(self.remote), step)
            if far is None:
                raise
            if isinstance(error, InvalidManifest):
                logger.warning("opening step %d by its upload manifest: %s", step, error)
            return Copies(far, (RemoteStep(self.remote, step, far.save_id),), "remote")

    def has_changed(self, step: int, opened: ShardManifest | None) -> bool:
        """**Local.** Whether a writer has pruned or replaced the step since it was chosen, or opened as `opened`."""
        if self.remote is None and not steps.is_committed(names.step_dir(self.root, step)):
            return True
        try:
            now = self.open(step).manifest
        except NoCheckpoint:
            return True
        except InvalidManifest:
            return False
        return opened is not None and now.save_id != opened.save_id
