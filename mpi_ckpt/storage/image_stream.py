"""A laid-out file as one stream: copied from the arrays piece by piece, digested and written as it passes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpi_ckpt.storage import direct, flat
from mpi_ckpt.storage.crc import CHUNK, RunningCrc, crc32c
from mpi_ckpt.storage.hdf5_image import Image
from mpi_ckpt.storage.staging import SLOT_BYTES, staging


@dataclass(frozen=True)
class Content:
    """What a dataset holds: `copy(lo, out)` puts its bytes lo.. into all of `out` (uint8).

    `table` (uint32, zeros at first) receives the crc32c of each chunk; None where nobody asks for it.
    """

    nbytes: int
    copy: Callable[[int, np.ndarray], None]
    table: np.ndarray | None = None


@dataclass(frozen=True)
class StreamedArray:
    """An array that is in no memory: `copy(lo, out)` puts its bytes lo.. (little-endian, C order) into all of `out`.

    `copy` is asked for every byte once, first to last, in whole elements.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    copy: Callable[[int, np.ndarray], None]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def array_content(array: np.ndarray | StreamedArray, table: np.ndarray) -> Content:
    """An array of any strides and byte order, or a streamed one, stored little-endian in C order."""
    if isinstance(array, StreamedArray):
        return Content(array.nbytes, array.copy, table)
    if array.flags.c_contiguous:
        array = array.reshape(-1)  # no copy, and a run of elements is a single slice
    dtype = array.dtype.newbyteorder("<")
    return Content(array.nbytes, lambda lo, out: flat.gather(array, lo // dtype.itemsize, out.view(dtype)), table)


def bytes_content(data: bytes | memoryview) -> Content:
    """Bytes as they are at the time when the stream gets to them."""
    source = np.frombuffer(data, np.uint8)
    return Content(source.size, lambda lo, out: np.copyto(out, source[lo : lo + out.size]))


def write_image(fd: int, image: Image, contents: Sequence[Content]) -> tuple[str, int]:
    """**Local.** Write the image with its datasets' `contents` to `fd`, padded to whole pages; (sha256, crc32c) of it.

    The caller's thread copies and takes the crc32c, one lane takes the sha256, two write. Raises what any of them
    raised, with all of them ended.
    """
    sha256, source = hashlib.sha256(), _Source(image, contents)
    with staging("sha256", "write", "write") as (slots, (hashing, *writing)):
        for i, lo in enumerate(range(0, image.nbytes, SLOT_BYTES)):
            slot = slots[i % len(slots)]
            slot.settle()
            piece = slot.buffer[: min(SLOT_BYTES, image.nbytes - lo)]
            source.read_into(piece)
            padded = slot.buffer[: direct.align_up(piece.size)]
            writer = writing[i % len(writing)]
            slot.jobs = [hashing.submit(sha256.update, piece), writer.submit(direct.write_all, fd, padded, lo)]
        for slot in slots:
            slot.settle()
    return sha256.hexdigest(), source.crc.value


class _Source:
    """The bytes of the image from first to last, and their crc32c so far."""

    def __init__(self, image: Image, contents: Sequence[Content]) -> None:
        self.crc = RunningCrc()
        self._parts = _parts(image, contents)
        self._part = next(self._parts)
        self._at = 0  # in the part

    def read_into(self, out: np.ndarray) -> None:
        """The next `out.size` bytes."""
        while out.size:
            while self._at == self._part.nbytes:
                self._part, self._at = next(self._parts), 0
            piece = out[: self._part.nbytes - self._at]
            self._part.copy(self._at, piece)
            self._digest(piece)
            self._at += piece.size
            out = out[piece.size :]

    def _digest(self, piece: np.ndarray) -> None:
        table, at = self._part.table, self._at
        if table is None:
            self.crc.update(piece)
            return
        while piece.size:
            chunk = at // CHUNK
            end = (chunk + 1) * CHUNK
            part = piece[: end - at]
            table[chunk] = crc = crc32c(part, int(table[chunk]))
            at += part.size
            piece = piece[part.size :]
            if end > self._part.nbytes:  # the last chunk, shorter than the others
                self.crc.update(part)
            elif at == end:
                self.crc.append_chunk(crc)


def _parts(image: Image, contents: Sequence[Content]) -> Iterator[Content]:
    """Head, then the datasets in file order with the zeros before each that align it."""
    yield bytes_content(image.head)
    at = len(image.head)
    for offset, content in zip(image.offsets, contents, strict=True):
        if content.nbytes:
            yield Content(offset - at, lambda lo, out: out.fill(0))
            yield content
            at = offset + content.nbytes
