"""The part of one saved block that somebody wants: which bytes of the file it takes, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpi_ckpt.layout import Block, overlap
from mpi_ckpt.storage import flat
from mpi_ckpt.storage.crc import CHUNK
from mpi_ckpt.storage.read_ahead import Range
from mpi_ckpt.storage.records import BlockRecord
from mpi_ckpt.storage.staging import SLOT_BYTES

_CHUNKS_PER_SLOT = SLOT_BYTES // CHUNK


@dataclass(frozen=True, eq=False)
class BlockRead:
    """`part`, a non-empty box of the global array within the saved block, is wanted in `out`, which holds `region`."""

    record: BlockRecord
    part: Block
    region: Block
    out: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The type of the bytes in the file."""
        return self.out.dtype.newbyteorder("<")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block in the file."""
        return self.record.nbytes(self.dtype.itemsize)

    @property
    def end(self) -> int:
        """Offset in the file of the first byte after the block."""
        return self.record.offset + self.nbytes

    def ranges(self) -> Iterator[Range[BlockRead]]:
        """The ranges of the file, each of whole chunks, that hold the part."""
        run: list[int] = []
        for chunk in self._chunks():
            if run and (chunk != run[-1] + 1 or len(run) == _CHUNKS_PER_SLOT):
                yield self._range(run)
                run = []
            run.append(chunk)
        yield self._range(run)

    def put(self, data: np.ndarray, lo: int) -> None:
        """Copy to `out` what `data`, the bytes of the file from offset `lo` on, has of the part."""
        first, last = max(lo, self.record.offset), min(lo + data.size, self.end)
        if first < last:
            elements = data[first - lo : last - lo].view(self.dtype)
            at = (first - self.record.offset) // self.dtype.itemsize
            flat.scatter(elements, at, self.record.block, self.region, self.out)

    def _chunks(self) -> Iterator[int]:
        """The chunks of the block in which an element of the part lies, ascending."""
        block, per_chunk = self.record.block, CHUNK // self.dtype.itemsize
        first = _position(self.part.start, block)
        last = _position(tuple(n - 1 for n in self.part.stop), block)
        for chunk in range(first // per_chunk, last // per_chunk + 1):
            lo, hi = chunk * per_chunk, min((chunk + 1) * per_chunk, block.size)
            if any(overlap(box, self.part) for box in flat.boxes_of(block, lo, hi)):
                yield chunk

    def _range(self, chunks: list[int]) -> Range[BlockRead]:
        offset = self.record.offset
        return Range(offset + chunks[0] * CHUNK, min(offset + (chunks[-1] + 1) * CHUNK, self.end), self)


def block_read(record: BlockRecord, region: Block, out: np.ndarray) -> BlockRead | None:
    """What a region takes of a block; None when they share nothing. ValueError when `out` does not fit the region."""
    if out.shape != region.shape:
        raise ValueError(f"out: found an array of shape {out.shape}, expected {region.shape}, the region's shape")
    part = overlap(record.block, region)
    return BlockRead(record, part, region, out) if part is not None else None


def _position(index: tuple[int, ...], block: Block) -> int:
    """Where an element of the global array comes in the block's C order."""
    position = 0
    for i, start, n in zip(index, block.start, block.shape, strict=True):
        position = position * n + i - start
    return position
