"""Which bytes of which shard a rank needs: the overlap of what it holds now with what was saved.

Nothing here knows the old or the new number of ranks. A rank that holds the same blocks as before finds each of them
whole in its own file; any other decomposition finds pieces in several.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpi_ckpt.checkpoint.state import Leaves, stored_dtype
from mpi_ckpt.errors import LayoutMismatch
from mpi_ckpt.layout import Block, overlap
from mpi_ckpt.storage.manifest import ArrayRecord, BlockRecord, ShardManifest


@dataclass(frozen=True)
class Read:
    """One piece: `region` of the saved block `source` of array `key`, to be put into `out` (same shape as `region`)."""

    key: str
    source: BlockRecord
    region: Block
    out: np.ndarray

    @property
    def whole(self) -> bool:
        """True when the piece is the whole saved block."""
        return self.region == self.source.block


def plan_reads(manifest: ShardManifest, leaves: Leaves) -> dict[int, list[Read]]:
    """**Local.** The pieces that fill this rank's arrays, by the rank whose shard holds them; none for empty blocks."""
    plan: dict[int, list[Read]] = {}
    wanted = [(key, shard.array, shard.block) for key, shards in leaves.shards.items() for shard in shards]
    wanted += [(key, array, Block((0,) * array.ndim, array.shape)) for key, array in leaves.arrays.items()]
    for record in manifest.shards:
        for key, array, mine in wanted:
            for source in record.blocks.get(key, ()):
                region = overlap(mine, source.block)
                if region is not None:
                    plan.setdefault(record.rank, []).append(Read(key, source, region, array[region.within(mine)]))
    return plan


def check_fits(manifest: ShardManifest, leaves: Leaves, path: object) -> None:
    """**Local.** Raise LayoutMismatch unless the arrays of the state are, key by key, arrays of the checkpoint.

    Key, kind, dtype and global shape must be equal: a restore never casts, pads or leaves anything out.
    """
    arrays = {key: (ArrayRecord(stored_dtype(s[0].array), s[0].shape), s) for key, s in leaves.shards.items()}
    for key, (array, shards) in arrays.items():
        _check_array(manifest, key, array, path)
        for shard in shards:
            _check_writeable(key, shard.array)
    for key, replicated in leaves.arrays.items():
        _check_array(manifest, key, ArrayRecord(stored_dtype(replicated), replicated.shape, replicated=True), path)
        _check_writeable(key, replicated)


def check_keys(saved: dict[str, str], wanted: dict[str, str], selected: bool, path: object) -> None:
    """**Local.** Raise LayoutMismatch unless `saved` and `wanted` (key -> kind) are equal.

    With `selected` (the caller asked for some keys only) the checkpoint may hold more.
    """
    for key, kind in wanted.items():
        if saved.get(key) != kind:
            raise LayoutMismatch(
                f"{key!r} is not in the checkpoint as the state has it",
                path=path,
                found=saved.get(key, "no such key"),
                expected=kind,
                action="Restore into a state of the same keys and kinds, or name the keys to restore in `keys`.",
            )
    extra = [key for key in saved if key not in wanted]
    if extra and not selected:
        raise LayoutMismatch(
            f"the checkpoint holds {', '.join(map(repr, extra[:8]))}, which the state does not",
            path=path,
            found=f"{len(extra)} key(s) more than the state",
            expected="the same keys",
            action="Add them to the state, or name the keys to restore in `keys`.",
        )


def _check_array(manifest: ShardManifest, key: str, mine: ArrayRecord, path: object) -> None:
    saved = manifest.arrays[key]
    if (saved.dtype, tuple(saved.shape)) != (mine.dtype, tuple(mine.shape)):
        raise LayoutMismatch(
            f"array {key!r} differs in dtype or global shape from the checkpoint",
            path=path,
            found=f"{saved.dtype} {tuple(saved.shape)} in the checkpoint",
            expected=f"{mine.dtype} {tuple(mine.shape)}, as in the state",
            action="Restore into an array of the saved dtype and shape and convert afterwards: nothing is cast here.",
        )


def _check_writeable(key: str, array: np.ndarray) -> None:
    if not array.flags.writeable:
        raise LayoutMismatch(
            f"the array at {key!r} cannot be restored in place",
            found="a read-only array",
            expected="an array that can be written to",
            action="Pass a writeable array.",
        )
