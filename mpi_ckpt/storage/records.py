"""The entries of a manifest: what is stored where. Plain data, the same words as in the JSON.

Those that a manifest has by the ten thousand are named tuples, which are made four times as fast as data classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from mpi_ckpt.layout import Block

FORMAT = "mpi_ckpt"
SCHEMA_VERSION = 1
MAX_AXES = 32  # of HDF5 (H5S_MAX_RANK)

# Every dtype that a shard may hold, as NumPy and the manifest write it (little-endian), and its itemsize in bytes.
ITEMSIZE = {
    "|b1": 1,
    **{"|i1": 1, "<i2": 2, "<i4": 4, "<i8": 8},
    **{"|u1": 1, "<u2": 2, "<u4": 4, "<u8": 8},
    **{"<f2": 2, "<f4": 4, "<f8": 8},
    **{"<c8": 8, "<c16": 16},
}


class BlockRecord(NamedTuple):
    """One block in a shard: where it lies in its global array, and where its bytes and their crc32c lie in the file."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int  # of the first byte in the file, a multiple of 4096; 0 when empty
    table_offset: int  # of the crc32c (uint32) of its first MiB
    table_crc32c: str  # of the table's bytes

    @property
    def block(self) -> Block:
        """The same as a Block of the global array."""
        return Block(self.start, self.shape)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the block in the file."""
        return math.prod(self.shape) * itemsize


class ValuesRecord(NamedTuple):
    """The dataset of tagged JSON bytes in a shard; offset 0 when empty."""

    offset: int
    nbytes: int
    crc32c: str


class ShardRecord(NamedTuple):
    """One rank's file. `sha256` and `crc32c` are those of the whole file; `blocks` has, by key, what the rank holds.

    `param_shard_offset` and `param_shard_numel` are the rank's interval of the flat parameter space, in elements, where
    there is one and the rank holds a single interval of it.
    """

    rank: int
    path: str  # plain file name within the step's directory
    nbytes: int
    sha256: str
    crc32c: str
    blocks: dict[str, tuple[BlockRecord, ...]]
    values: ValuesRecord
    param_shard_offset: int | None = None
    param_shard_numel: int | None = None


@dataclass(frozen=True)
class ArrayRecord:
    """A global array. A replicated one is equal on every rank and stored by one."""

    dtype: str
    shape: tuple[int, ...]
    replicated: bool = False


class IndexRecord(NamedTuple):
    """A named interval of the flat parameter space: first element, and the shape that its elements have in C order."""

    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + math.prod(self.shape)
