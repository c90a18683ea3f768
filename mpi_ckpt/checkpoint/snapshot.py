"""What one rank brings to a save: its blocks and values, and a small description that all ranks compare.

Arrays are the live ones for a synchronous save, and copies in buffers that are kept from save to save for an
asynchronous one: the first touch of fresh memory costs ten times a copy into memory that is there already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from mpi_ckpt.checkpoint import values
from mpi_ckpt.checkpoint.state import Leaves, stored_dtype
from mpi_ckpt.errors import LayoutMismatch
from mpi_ckpt.layout import Block, check_tiling
from mpi_ckpt.storage.manifest import ArrayRecord
from mpi_ckpt.storage.shard_file import BlockToWrite

_ALIGNMENT = 4096


@dataclass(frozen=True)
class Description:
    """A rank's state without its bytes, small enough to send to rank 0."""

    arrays: dict[str, ArrayRecord]
    blocks: dict[str, list[Block]]  # of the sharded arrays
    digests: dict[str, int]  # crc32c of every replicated leaf
    per_rank: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a save."""

    description: Description
    blocks: list[BlockToWrite]
    values: bytes


class Buffers:
    """Memory for the copies of an asynchronous save, one buffer a block, kept as long as the sizes stay the same."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], np.ndarray] = {}

    def copy(self, key: str, index: int, array: np.ndarray) -> np.ndarray:
        """**Local.** A C-ordered copy of `array` that stays until the next copy of the same block."""
        buffer = self._buffers.get((key, index))
        if buffer is None or buffer.nbytes != array.nbytes:
            buffer = self._buffers[key, index] = _aligned(array.nbytes)
        copied = buffer.view(array.dtype).reshape(array.shape) if array.nbytes else np.empty_like(array)
        np.copyto(copied, array)
        return copied


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    buffer = raw[offset : offset + nbytes]
    buffer.fill(0)  # touch every page now: the first save pays, no later one does
    return buffer


def take(leaves: Leaves, rank: int, buffers: Buffers | None = None) -> Snapshot:
    """**Local.** The snapshot of this rank's state; with `buffers` it shares no memory with the application.

    Raises UnsupportedState for a value that cannot be saved exactly.
    """
    replicated = {key: values.encode(key, parent[name]) for key, (parent, name) in leaves.values.items()}
    own = {key: values.encode(key, leaf.value) for key, leaf in leaves.per_rank.items()}
    document = {"per_rank": own} | ({"replicated": replicated} if rank == 0 else {})
    description = describe(leaves, replicated)
    blocks = []
    for key, index, array, block, shape in _blocks(leaves, rank):
        kept = buffers.copy(key, index, array) if buffers is not None else array
        blocks.append(BlockToWrite(key, kept, block, shape))
    return Snapshot(description, blocks, values.dumps(document))


def _blocks(leaves: Leaves, rank: int) -> list[tuple[str, int, np.ndarray, Block, tuple[int, ...]]]:
    found = [
        (key, index, shard.array, shard.block, shard.shape)
        for key, shards in leaves.shards.items()
        for index, shard in enumerate(shards)
    ]
    if rank == 0:  # replicated arrays are stored once
        found += [(key, 0, a, Block((0,) * a.ndim, a.shape), a.shape) for key, a in leaves.arrays.items()]
    return found


def describe(leaves: Leaves, replicated: dict[str, Any]) -> Description:
    """**Local.** What the other ranks must agree with."""
    arrays = {key: ArrayRecord(stored_dtype(s[0].array), s[0].shape) for key, s in leaves.shards.items()}
    arrays |= {key: ArrayRecord(stored_dtype(a), a.shape, replicated=True) for key, a in leaves.arrays.items()}
    digests = {key: crc32c(values.dumps(value)) for key, value in replicated.items()}
    digests |= {key: _digest(array) for key, array in leaves.arrays.items()}
    return Description(
        arrays=arrays,
        blocks={key: [shard.block for shard in shards] for key, shards in leaves.shards.items()},
        digests=digests,
        per_rank=tuple(leaves.per_rank),
        nbytes=sum(shard.array.nbytes for shards in leaves.shards.values() for shard in shards),
    )


def _digest(array: np.ndarray) -> int:
    """The crc32c of the bytes as they are stored, so that a rank's byte order makes no difference."""
    return crc32c(np.ascontiguousarray(array, stored_dtype(array)).reshape(-1).view(np.uint8).data)


def check_agreement(descriptions: list[Description]) -> int:
    """**Local.** The bytes of all ranks' arrays. Raises LayoutMismatch unless they are parts of one global state.

    The same keys of the same kinds everywhere, the same dtype and global shape of every array, equal replicated values,
    and blocks that tile every sharded array.
    """
    first = descriptions[0]
    for rank, other in enumerate(descriptions[1:], start=1):
        _check_same(rank, "array", first.arrays, other.arrays)
        _check_same(rank, "value per rank", dict.fromkeys(first.per_rank), dict.fromkeys(other.per_rank))
        _check_same(rank, "replicated value", first.digests, other.digests)
    for key, array in first.arrays.items():
        if not array.replicated:
            check_tiling(key, array.shape, [block for d in descriptions for block in d.blocks[key]])
    return sum(description.nbytes for description in descriptions)


def _check_same(rank: int, what: str, mine: dict[str, Any], others: dict[str, Any]) -> None:
    for key in [*mine, *(key for key in others if key not in mine)]:
        if key not in mine or key not in others:
            raise LayoutMismatch(
                f"the ranks' states differ: {what} {key!r} is not on every rank",
                rank=rank,
                found=f"{'only' if key in others else 'missing'} on rank {rank}",
                expected=f"{'missing too' if key in others else 'there'}, as on rank 0",
                action="Pass the same keys on every rank (a Shard may be empty).",
            )
        if mine[key] != others[key]:
            detail = isinstance(mine[key], ArrayRecord)
            raise LayoutMismatch(
                f"the ranks' states differ: {what} {key!r} is not equal on all ranks",
                rank=rank,
                found=others[key] if detail else f"another value on rank {rank}",
                expected=mine[key] if detail else "the value of rank 0",
                action="Wrap what differs between ranks in PerRank, or make it equal before saving.",
            )
