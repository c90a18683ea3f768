"""Arrays that begin on a page."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

PAGE = 4096  # bytes


def aligned_zeros(size: int, dtype: DTypeLike) -> np.ndarray:
    """Zeros [size] that begin on a page, every page already mapped.

    NumPy's own large arrays begin 16 bytes after one: off the cache lines, which halves the speed of element-wise work
    in the cache, and where direct I/O cannot take them without a copy. The zeros are written, so that no later step
    pays the page faults.
    """
    nbytes = size * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + PAGE, dtype=np.uint8)
    first = -raw.ctypes.data % PAGE
    array = raw[first : first + nbytes].view(dtype)
    array.fill(0)
    return array
