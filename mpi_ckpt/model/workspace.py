"""Memory that is allocated once and lent again at every step.

A large array that NumPy allocates for a temporary is mapped, touched page by page and unmapped again; in a training
step that costs more than the arithmetic on it. So every intermediate array of the model is a view of a buffer that
lives as long as the model.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register; NumPy's own large arrays start 16 bytes off


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Zeros that start at a multiple of 64 bytes, every page touched already."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    raw.fill(0)  # writes, so that the page faults happen now; np.zeros would leave them to the first use
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


class Workspace:
    """Named buffers. The first `take` of a name allocates; later ones lend the same memory, whole or in part."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._buffers: dict[str, np.ndarray] = {}

    def take(self, name: str, *shape: int, dtype: DTypeLike | None = None) -> np.ndarray:
        """The first elements of the buffer `name`, as a C-contiguous array of `shape`; zeros when it is new.

        Whoever takes a name again sees what the last one left: arrays that are needed at different times share memory
        by sharing a name. The first `take` must be the largest.
        """
        size = math.prod(shape)
        if name not in self._buffers:
            self._buffers[name] = aligned_zeros((size,), self.dtype if dtype is None else dtype)
        return self._buffers[name][:size].reshape(shape)
