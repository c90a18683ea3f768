"""Euclidean norms in float64 whose bits depend on the values alone."""

from __future__ import annotations

import numpy as np

NORM_BLOCK = 32768  # elements: 256 KiB of float64 stay in the cache. Another size changes the last bits


def squared_norm(values: np.ndarray, scratch: np.ndarray) -> float:
    """**Local.** Sum of the squares of `values` [n], any float dtype, accumulated in float64.

    `scratch` is float64 [NORM_BLOCK]. The blocks are fixed, each is summed by NumPy's pairwise sum and the blocks in
    order; BLAS, whose order depends on its threads and on the processor, is not asked. A NaN or an infinity among
    float32 or float16 values makes the result NaN or infinite, and nothing else does.
    """
    total = 0.0
    for low in range(0, values.size, NORM_BLOCK):
        block = values[low : low + NORM_BLOCK]
        wide = scratch[: block.size]
        np.copyto(wide, block)
        np.multiply(wide, wide, out=wide)
        total += float(np.add.reduce(wide))
    return total
