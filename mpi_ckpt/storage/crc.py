"""crc32c (Castagnoli) of the file and of every 1 MiB of a block, without looking at a byte twice.

The crc of the file is put together from those of the chunks: with L(c) the linear map over GF(2) that appends one chunk
of zeros to a message of crc c, crc(A + B) = L(crc(A)) ^ crc(B). (M. Adler's crc32_combine in zlib rests on the same.)
"""

from __future__ import annotations

import functools

import crc32c as _package
import numpy as np

CHUNK = 1 << 20  # bytes: the unit in which a part of a block can be read and verified


def crc32c(data: bytes | np.ndarray, value: int = 0) -> int:
    """The crc32c of contiguous `data`, or of what has the crc32c `value` followed by `data`."""
    return _package.crc32c(data.data if isinstance(data, np.ndarray) else data, value)


def n_chunks(nbytes: int) -> int:
    """How many chunks, the last one possibly shorter, make `nbytes`."""
    return -(-nbytes // CHUNK)


def hexadecimal(crc: int) -> str:
    """A crc32c as manifest and messages write it: eight lower-case digits."""
    return f"{crc:08x}"


@functools.cache
def _shift_columns() -> tuple[int, ...]:
    """L of each single bit. crc32c(zeros, c) = L(c) ^ crc32c(zeros, 0), hence L(c) without any matrix. About 3 ms."""
    zeros = bytes(CHUNK)
    nothing = crc32c(zeros)
    return tuple(crc32c(zeros, 1 << bit) ^ nothing for bit in range(32))


class RunningCrc:
    """The crc32c of a stream that arrives in order, as bytes or as the crc of a whole chunk."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: np.ndarray) -> None:
        """Append bytes."""
        self.value = crc32c(data, self.value)

    def append_chunk(self, crc: int) -> None:
        """Append a chunk of exactly CHUNK bytes whose crc32c is `crc`."""
        value, shifted = self.value, 0
        for column in _shift_columns():
            if value & 1:
                shifted ^= column
            value >>= 1
        self.value = shifted ^ crc
