"""A laid-out file as one stream: copied from the arrays piece by piece, digested and written as it passes."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpi_ckpt.storage import direct, flat
from mpi_ckpt.storage.crc import CHUNK, RunningCrc, crc32c
from mpi_ckpt.storage.hdf5_image import Image
from mpi_ckpt.storage.staging import IN_PLACE_BYTES, Slot, staging

_AHEAD = 16  # pieces in place, 128 MiB, that may wait for their lanes: enough that none of these runs dry


@dataclass(frozen=True)
class Content:
    """What a dataset holds: `copy(lo, out)` puts its bytes lo.. into all of `out` (uint8).

    `table` (uint32, zeros at first) receives the crc32c of each chunk; None where nobody asks for it. `memory` (uint8)
    is the bytes themselves, if they lie in memory as the file will have them.
    """

    nbytes: int
    copy: Callable[[int, np.ndarray], None]
    table: np.ndarray | None = None
    memory: np.ndarray | None = None

    def in_place(self, lo: int) -> np.ndarray | None:
        """Whole pages of the bytes lo.., at most IN_PLACE_BYTES, if a disk can take them from where they lie."""
        if self.memory is None or (self.memory.ctypes.data + lo) % direct.ALIGN:
            return None
        nbytes = direct.align_down(min(IN_PLACE_BYTES, self.nbytes - lo))
        return self.memory[lo : lo + nbytes] if nbytes else None


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
    dtype, memory = array.dtype.newbyteorder("<"), None
    if array.flags.c_contiguous:
        array = array.reshape(-1)  # no copy, and a run of elements is a single slice
        memory = np.asarray(array).reshape(-1).view(np.uint8) if array.dtype == dtype else None

    def copy(lo: int, out: np.ndarray) -> None:
        flat.gather(array, lo // dtype.itemsize, out.view(dtype))

    return Content(array.nbytes, copy, table, memory)


def bytes_content(data: bytes | memoryview) -> Content:
    """Bytes as they are at the time when the stream gets to them."""
    source = np.frombuffer(data, np.uint8)
    return Content(source.size, lambda lo, out: np.copyto(out, source[lo : lo + out.size]))


def write_image(fd: int, image: Image, contents: Sequence[Content]) -> tuple[str, int]:
    """**Local.** Write the image with its datasets' `contents` to `fd`, padded to whole pages; (sha256, crc32c) of it.

    The caller's thread takes the crc32c, and copies what does not lie ready in memory; one lane takes the sha256, two
    write. Raises what any of them raised, with all of them ended.
    """
    sha256, source, lo = hashlib.sha256(), _Source(image, contents), 0
    with staging("sha256", "write", "write") as (slots, (hashing, *writing)):
        free, writers, in_place = itertools.cycle(slots), itertools.cycle(writing), deque[Slot]()
        while lo < image.nbytes:
            piece = source.in_place()
            if piece is not None:
                slot = Slot(piece)
                in_place.append(slot)
            else:
                slot = next(free)
                slot.settle()
                piece = source.copied(slot.buffer)
            pages = slot.buffer[: direct.align_up(piece.size)]
            if piece.size < pages.size:  # the last piece, never in place
                pages[piece.size :] = 0
            slot.jobs = [hashing.submit(sha256.update, piece), next(writers).submit(direct.write_all, fd, pages, lo)]
            lo += piece.size
            if len(in_place) > _AHEAD:
                in_place.popleft().settle()
        for slot in (*in_place, *slots):
            slot.settle()
    return sha256.hexdigest(), source.crc.value


def view_image(image: Image, contents: Sequence[Content], lo: int, n: int) -> np.ndarray | None:
    """**Local.** The image's bytes lo..lo+n-1, uint8 [n], if they lie together in memory; else None."""
    for offset, content in zip(image.offsets, contents, strict=True):
        if content.memory is not None and offset <= lo and lo + n <= offset + content.nbytes:
            return content.memory[lo - offset : lo - offset + n]
    return None


def read_image(image: Image, contents: Sequence[Content], lo: int, out: np.ndarray) -> None:
    """**Local.** The image's bytes lo.. into all of `out` (uint8), from memory. `lo` begins on a page."""
    begin, hi = 0, lo + out.size
    for part in _parts(image, contents):
        end = begin + part.nbytes
        if begin < hi and end > lo:
            first, last = max(begin, lo), min(end, hi)
            part.copy(first - begin, out[first - lo : last - lo])
        begin = end


class _Source:
    """The image from first to last, in pieces that begin on a page of the file, and their crc32c so far."""

    def __init__(self, image: Image, contents: Sequence[Content]) -> None:
        self.crc = RunningCrc()
        self._parts = _parts(image, contents)
        self._part = next(self._parts)
        self._at = 0  # in the part

    def in_place(self) -> np.ndarray | None:
        """The next piece where it lies in memory, or None: then it has to be copied."""
        self._find_part()
        piece = self._part.in_place(self._at)
        if piece is not None:
            self._pass(piece)
        return piece

    def copied(self, room: np.ndarray) -> np.ndarray:
        """The next piece, copied into `room`. It ends when that is full, before bytes in place, and with the file."""
        done = 0
        while done < room.size and self._find_part():
            if done and done % direct.ALIGN == 0 and self._part.in_place(self._at) is not None:
                break
            piece = room[done : done + self._part.nbytes - self._at]
            self._part.copy(self._at, piece)
            self._pass(piece)
            done += piece.size
        return room[:done]

    def _find_part(self) -> bool:
        """Go to the part that has the next byte. False at the end of the file."""
        while self._at == self._part.nbytes:
            following = next(self._parts, None)
            if following is None:
                return False
            self._part, self._at = following, 0
        return True

    def _pass(self, piece: np.ndarray) -> None:
        self._digest(piece)
        self._at += piece.size

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
