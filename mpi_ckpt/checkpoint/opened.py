"""A step that is open for restoring, and what was asked of the restore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpi_ckpt.checkpoint.documents import Document, read_document, read_per_rank
from mpi_ckpt.checkpoint.state import Leaves
from mpi_ckpt.checkpoint.tiers import Copies
from mpi_ckpt.errors import WorldSizeMismatch
from mpi_ckpt.storage.manifest import ShardManifest


@dataclass(frozen=True)
class RestoreOptions:
    """How to restore. `step` None is the newest. `keys` None is everything. See `Checkpointer.restore`."""

    step: int | None = None
    keys: tuple[str, ...] | None = None
    world_size: str = "same"
    verify: str = "full"
    on_damage: str = "raise"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("world_size", ("same", "any")),
            ("verify", ("full", "quick", "none")),
            ("on_damage", ("raise", "older")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: found {value!r}, expected one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class Opened:
    """A step that rank 0 has opened: where its shards lie, its manifest, and the values that every rank needs."""

    copies: Copies
    replicated: Document
    per_rank_keys: tuple[str, ...]
    old_per_rank: list[Document] | None  # of the ranks that saved them, unless each rank's own lie in its shard

    @property
    def manifest(self) -> ShardManifest:
        return self.copies.manifest


Template = Callable[[Opened], Leaves]


def open_copies(copies: Copies, size: int, options: RestoreOptions) -> Opened:
    """**Local.** The values that all of `size` ranks need of a step. Raises WorldSizeMismatch, MissingShard,
    CorruptShard."""
    check_world_size(copies, size, options)
    manifest = copies.manifest
    document = copies.nearest(lambda directory: read_document(directory, manifest, 0))
    own_still = manifest.world_size == size and "old_per_rank" not in document
    old = None if own_still else copies.nearest(lambda directory: read_per_rank(directory, manifest, document))
    return Opened(copies, document["replicated"], tuple(old[0] if old else document["per_rank"]), old)


def check_world_size(copies: Copies, size: int, options: RestoreOptions) -> None:
    """**Local.** Raise WorldSizeMismatch where another number of ranks saved the step and that was not asked for."""
    manifest = copies.manifest
    if manifest.world_size != size and options.world_size == "same":
        raise WorldSizeMismatch(
            f"step {manifest.step} was saved by another number of ranks",
            path=copies.manifest_path,
            found=f"{manifest.world_size} ranks in the checkpoint",
            expected=f"{size} ranks, as many as are running",
            action="Run on as many ranks, or ask for resharding: world_size='any' (--elastic).",
        )
