"""What differs between two arrays of one dtype, bit by bit, gathered piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Difference:
    """The elements of an array whose bits differ: how many, the first one, and by how much.

    `first` is the position of the first one in C order. `max_abs` is the largest |a - b|, `max_rel` the largest
    |a - b| / max(|a|, |b|), both over the elements where that is a finite number; `nonfinite` counts the others, such
    as a NaN beside a number.
    """

    count: int = 0
    first: int | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0
    nonfinite: int = 0

    def add(self, a: np.ndarray, b: np.ndarray, positions: np.ndarray) -> None:
        """Elements that differ, 1-d, and their positions in the array, in any order."""
        self.count += a.size
        first = int(positions.min())
        self.first = first if self.first is None else min(self.first, first)
        distance, relative = _distances(a, b)
        finite = np.isfinite(distance)
        self.nonfinite += int(a.size - np.count_nonzero(finite))
        if finite.any():
            self.max_abs = max(self.max_abs, float(distance[finite].max()))
            self.max_rel = max(self.max_rel, float(relative[finite].max()))


def differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The indices at which two 1-d contiguous arrays of one dtype differ in a bit: NaN equals itself, 0.0 not -0.0."""
    raw_a, raw_b = a.view(np.uint8), b.view(np.uint8)
    if np.array_equal(raw_a, raw_b):
        return np.empty(0, np.int64)
    return np.flatnonzero((raw_a.reshape(a.size, -1) != raw_b.reshape(a.size, -1)).any(axis=1))


def _distances(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|a - b| and |a - b| / max(|a|, |b|) of each element, float64; not finite where a value is not."""
    if a.dtype.kind in "iu":
        # In unsigned arithmetic, modulo 2^n, larger - smaller is exact.
        unsigned = np.dtype(f"u{a.dtype.itemsize}")
        distance = (np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)).astype(np.float64)
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a_wide, b_wide = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        if a.dtype.kind not in "iu":
            distance = np.abs(a_wide - b_wide)
        scale = np.maximum(np.abs(a_wide), np.abs(b_wide))
        relative = np.divide(distance, scale, out=np.zeros_like(distance), where=scale > 0)
    return distance, relative
