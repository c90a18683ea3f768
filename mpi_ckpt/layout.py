"""Where a rank's part lies in a global array: arithmetic only, no MPI, no files.

A *block* is an axis-aligned box of a global array: `start` and `shape`, one integer an axis. A *shard* is a block with
its bytes. Any decomposition is a set of blocks that tile the global array: no gap, no overlap, nothing outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_ckpt.errors import LayoutMismatch


@dataclass(frozen=True)
class Block:
    """A box of a global array: first index and extent on every axis. `()` and `()` for a 0-d array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index on every axis."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def within(self, outer: Block) -> tuple[Any, ...]:
        """The index that cuts this block, as a view, out of an array that holds `outer`."""
        slices = (slice(a - b, a - b + n) for a, b, n in zip(self.start, outer.start, self.shape, strict=True))
        return (..., *slices)  # the dots: without them a 0-d array would give a copy


class Shard:
    """This rank's block of a global array.

    `array` holds the values (any strides, any byte order), `start` the block's first index on every axis of the global
    array (a plain int for one axis), `shape` the global array's shape. Raises LayoutMismatch when the block does not
    fit into the global shape.
    """

    __slots__ = ("array", "block", "shape")

    def __init__(self, array: np.ndarray, start: int | Sequence[int], shape: int | Sequence[int]) -> None:
        self.array = array
        self.block = Block(_as_tuple(start), tuple(array.shape))
        self.shape = _as_tuple(shape)
        fits = len(self.block.start) == len(self.shape) == array.ndim and all(
            a >= 0 and a + n <= total for a, n, total in zip(self.block.start, array.shape, self.shape, strict=True)
        )
        if not fits:
            raise LayoutMismatch(
                "a shard lies outside its global array",
                found=f"start {self.block.start}, array shape {array.shape}",
                expected=f"a block within the global shape {self.shape}, one start an axis",
                action="Pass the block's first global index on every axis as `start` and the global shape as `shape`.",
            )

    def __repr__(self) -> str:
        return f"Shard({self.array.dtype.str}, start={self.block.start}, {self.array.shape} of {self.shape})"


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (int(value),) if isinstance(value, (int, np.integer)) else tuple(int(v) for v in value)


def shard_range(n: int, size: int, rank: int) -> tuple[int, int]:
    """`(start, stop)` of `rank`'s interval when `n` things are dealt to `size` ranks.

    Balanced: the first `n % size` ranks hold one more than the others; with `n < size` the last ranks hold none.
    """
    base, extra = divmod(n, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def overlap(a: Block, b: Block) -> Block | None:
    """The box that two blocks of one global array share, or None when they share no element."""
    start = tuple(map(max, a.start, b.start))
    shape = tuple(min(p, q) - s for p, q, s in zip(a.stop, b.stop, start, strict=True))
    return Block(start, shape) if all(n > 0 for n in shape) else None


def check_tiling(name: str, shape: tuple[int, ...], blocks: Sequence[Block]) -> None:
    """Raise LayoutMismatch unless `blocks` cover the array `name` of global shape `shape` exactly once.

    Empty blocks are allowed anywhere inside. Cost: O(n log n) for n blocks along one axis, and vectorised comparisons
    with the blocks that a sweep along the first axis has open for more axes.
    """
    whole = Block((0,) * len(shape), shape)
    for block in blocks:
        if len(block.start) != len(shape) or len(block.shape) != len(shape):
            raise _tiling_error(name, shape, f"a block of {len(block.shape)} axes at {block.start}")
        if any(a < 0 or n < 0 or a + n > t for a, n, t in zip(block.start, block.shape, shape, strict=True)):
            raise _tiling_error(name, shape, f"a block outside the array: start {block.start}, shape {block.shape}")
    solid = sorted((b for b in blocks if b.size), key=lambda b: b.start)
    clash = _first_overlap(solid)
    if clash:
        raise _tiling_error(name, shape, f"blocks that overlap: {clash[0]} and {clash[1]}")
    covered = sum(b.size for b in solid)
    if covered != whole.size:
        raise _tiling_error(name, shape, f"a gap: blocks cover {covered} of {whole.size} elements")


def _first_overlap(blocks: list[Block]) -> tuple[Block, Block] | None:
    """Two blocks that share an element, of `blocks` sorted by start and none empty."""
    if not blocks:
        return None
    if len(blocks[0].start) == 0:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    start = np.array([b.start for b in blocks], dtype=np.int64)
    stop = np.array([b.stop for b in blocks], dtype=np.int64)
    if start.shape[1] == 1:
        late = np.flatnonzero(start[1:, 0] < stop[:-1, 0])
        return (blocks[late[0]], blocks[late[0] + 1]) if late.size else None
    opened: list[int] = []  # blocks that reach the sweep's plane along axis 0
    plane = -1
    for i in range(len(blocks)):
        if start[i, 0] != plane:
            plane = start[i, 0]
            opened = [j for j in opened if stop[j, 0] > plane]
        if opened:
            hits = ((start[opened, 1:] < stop[i, 1:]) & (start[i, 1:] < stop[opened, 1:])).all(axis=1)
            if hits.any():
                return blocks[opened[int(np.argmax(hits))]], blocks[i]
        opened.append(i)
    return None


def _tiling_error(name: str, shape: tuple[int, ...], found: str) -> LayoutMismatch:
    return LayoutMismatch(
        f"the blocks of array {name!r} do not tile it",
        found=found,
        expected=f"every element of the global shape {shape} in exactly one block",
        action="Check `start` and `shape` of the shards that the ranks pass.",
    )
