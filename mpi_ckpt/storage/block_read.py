"""The part of one saved block that somebody wants: which bytes of the file it takes, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpi_ckpt.layout import Block, overlap
from mpi_ckpt.storage import direct, flat
from mpi_ckpt.storage.crc import CHUNK
from mpi_ckpt.storage.read_ahead import Range
from mpi_ckpt.storage.records import BlockRecord
from mpi_ckpt.storage.staging import IN_PLACE_BYTES, SLOT_BYTES

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

    @cached_property
    def memory(self) -> np.ndarray | None:
        """All of `out` as bytes, if a disk can put them there: the whole block, as the file has it, on a page."""
        out = self.out
        whole = self.part == self.region == self.record.block
        if not whole or out.dtype != self.dtype or not out.flags.c_contiguous or out.ctypes.data % direct.ALIGN:
            return None
        return out.reshape(-1).view(np.uint8)

    def ranges(self) -> Iterator[Range[BlockRead]]:
        """The ranges of the file, each of whole chunks, that hold the part."""
        return self._in_place(self.memory) if self.memory is not None else self._by_chunks()

    def _in_place(self, memory: np.ndarray) -> Iterator[Range[BlockRead]]:
        end = memory.size // CHUNK * CHUNK
        for lo in range(0, end, IN_PLACE_BYTES):
            hi = min(lo + IN_PLACE_BYTES, end)
            yield Range(self.record.offset + lo, self.record.offset + hi, self, memory[lo:hi])
        if end < memory.size:  # a last chunk that is shorter than the others, and may end within a page
            yield Range(self.record.offset + end, self.end, self)

    def _by_chunks(self) -> Iterator[Range[BlockRead]]:
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
