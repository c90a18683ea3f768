"""Long curves drawn with few points, and honestly: the lowest and the highest of every bucket are real points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKETS = 500  # about one a pixel column of a figure


def extremes(y: Sequence[float], buckets: int = BUCKETS) -> tuple[list[int], int]:
    """Which of the values `y` (NaN is a gap) to draw, in order, and how many values share a bucket: 1 means all.

    The first and the last value, and of every bucket of consecutive values the lowest, the highest, and a gap if it has
    one. Cost: O(n).
    """
    values = np.asarray(y, dtype=np.float64)
    if values.size <= 4 * buckets:
        return list(range(values.size)), 1
    size = -(-values.size // buckets)
    chosen = {0, values.size - 1}
    for start in range(0, values.size, size):
        piece = values[start : start + size]
        gaps = np.isnan(piece)
        if gaps.any():
            chosen.add(start + int(np.argmax(gaps)))
        if not gaps.all():
            chosen |= {start + int(np.nanargmin(piece)), start + int(np.nanargmax(piece))}
    return sorted(chosen), size
