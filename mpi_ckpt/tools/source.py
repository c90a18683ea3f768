"""A global array of a committed step, read piece by piece in constant memory and verified on the way.

A *run* is a number of consecutive elements, in C order, of a box of the array: what one writes to a file or compares,
whatever the decomposition of the saved array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from mpi_ckpt.layout import Block
from mpi_ckpt.storage import flat
from mpi_ckpt.storage.manifest import ArrayRecord, BlockRecord, ShardManifest
from mpi_ckpt.storage.records import ITEMSIZE
from mpi_ckpt.storage.shard_file import StreamedArray, check_structure, read_blocks

WINDOW_BYTES = 16 << 20  # read at once: large beside the 1 MiB in which bytes are verified


class ArraySource:
    """One global array of a step: `dtype`, `shape`, and any part of it."""

    def __init__(self, directory: Path, manifest: ShardManifest, key: str) -> None:
        """**Local.** Reads nothing yet. Raises MissingShard or CorruptShard for a file that is not all there."""
        array = manifest.arrays[key]
        self.dtype = np.dtype(array.dtype)
        self.shape = array.shape
        self._held: list[tuple[Path, BlockRecord]] = []
        for shard in manifest.shards:
            solid = [block for block in shard.blocks.get(key, ()) if block.block.size]
            if solid:
                check_structure(directory / shard.path, shard)
                self._held += [(directory / shard.path, block) for block in solid]
        # Which blocks a region takes is asked for every piece: two comparisons a block in NumPy, not in Python.
        count, axes = len(self._held), len(self.shape)
        self._starts = np.array([block.start for _, block in self._held], np.int64).reshape(count, axes)
        extents = np.array([block.shape for _, block in self._held], np.int64).reshape(count, axes)
        self._stops = self._starts + extents

    @property
    def whole(self) -> Block:
        """The array as one block."""
        return Block((0,) * len(self.shape), self.shape)

    @property
    def blocks(self) -> list[Block]:
        """The saved blocks that hold an element."""
        return [record.block for _, record in self._held]

    def read(self, region: Block, out: np.ndarray) -> None:
        """**Local.** A box of the array into `out`, of the same shape and dtype. Raises MissingShard, CorruptShard."""
        if region.size == 0:
            return
        stop, start = np.array(region.stop), np.array(region.start)
        for i in np.flatnonzero(((self._starts < stop) & (start < self._stops)).all(axis=1)):
            path, record = self._held[i]
            read_blocks(path, [(record, region, out)])

    def read_run(self, block: Block, lo: int, out: np.ndarray) -> None:
        """**Local.** Elements lo.. (C order) of `block`, a box of the array, into all of `out` (1-d)."""
        at = 0
        for box in flat.boxes_of(block, lo, lo + out.size):
            self.read(box, out[at : at + box.size].reshape(box.shape))
            at += box.size


class Source(Protocol):
    """Whatever gives a global array run by run: elements lo.. (C order) of a box of it, into all of `out`."""

    dtype: np.dtype

    def read_run(self, block: Block, lo: int, out: np.ndarray) -> None: ...


class Windows:
    """The elements of a box in C order, for a consumer that takes them piece by piece, first to last.

    They are read in runs of WINDOW_BYTES, of whole rows where these are short: few, large reads, whatever is asked for.
    The memory is let go with the last element.
    """

    def __init__(self, source: Source, block: Block) -> None:
        self._source, self._block = source, block
        self._first = 0  # of the elements that are held
        self._held = self._nothing = np.empty(0, source.dtype)

    def copy(self, lo: int, out: np.ndarray) -> None:
        """**Local.** Elements lo.. into all of `out` (1-d, of the array's dtype). Raises MissingShard, CorruptShard."""
        while out.size:
            at = lo - self._first
            if not 0 <= at < self._held.size:
                self._load(lo)
                at = 0
            part = self._held[at : at + out.size]
            out[: part.size] = part
            lo, out = lo + part.size, out[part.size :]
        if lo == self._block.size:
            self._held = self._nothing

    def streamed(self) -> StreamedArray:
        """The box as an array that a shard can be written from."""
        dtype = self._source.dtype
        return StreamedArray(dtype, self._block.shape, lambda lo, out: self.copy(lo // dtype.itemsize, out.view(dtype)))

    def _load(self, lo: int) -> None:
        lo, hi = next(runs(self._block.shape, self._source.dtype.itemsize, lo))
        if self._held.size != hi - lo:  # else the same memory again: fresh memory costs more than a copy
            self._held = self._nothing
            self._held = np.empty(hi - lo, self._source.dtype)
        self._first = lo
        self._source.read_run(self._block, lo, self._held)


def runs(shape: tuple[int, ...], itemsize: int, lo: int = 0) -> Iterator[tuple[int, int]]:
    """The elements from `lo` on of an array of `shape` as (first, one past the last) of runs of about WINDOW_BYTES."""
    total, limit = math.prod(shape), max(1, WINDOW_BYTES // itemsize)
    row = math.prod(shape[1:])
    while lo < total:
        hi = min(total, lo + limit)
        if row and row <= limit:
            hi = min(total, (lo + limit) // row * row)
        yield lo, hi
        lo = hi


def array_bytes(arrays: dict[str, ArrayRecord]) -> int:
    """Bytes of all arrays, each once."""
    return sum(math.prod(array.shape) * ITEMSIZE[array.dtype] for array in arrays.values())
