"""The arrays and named parameters in which two steps differ, read piece by piece in constant memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mpi_ckpt.layout import Block
from mpi_ckpt.storage import flat
from mpi_ckpt.storage.manifest import ArrayRecord, IndexRecord, ShardManifest, flat_arrays
from mpi_ckpt.tools.compare import Difference, differing
from mpi_ckpt.tools.finding import Finding
from mpi_ckpt.tools.progress import Advance
from mpi_ckpt.tools.source import ArraySource, runs

_ELEMENTS = 1 << 18  # compared at once: what a comparison needs of its own stays below 20 MiB

Step = tuple[Path, ShardManifest]


def diff_arrays(a: Step, b: Step, advance: Advance) -> Iterator[Finding]:
    """**Local.** Every difference in arrays and named parameters. `advance` is told of the bytes of `a`'s arrays.

    Where both steps have the same index, a difference in a flat array is told by parameter too; otherwise the
    parameters are compared by name, wherever they lie. Raises MissingShard, CorruptShard.
    """
    same_index = a[1].index == b[1].index
    for key in sorted(a[1].arrays.keys() | b[1].arrays.keys()):
        one, other = a[1].arrays.get(key), b[1].arrays.get(key)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            yield Finding("array", key, _described(one, one), _described(other, other))
        else:
            index = a[1].index if same_index and key in flat_arrays(a[1].arrays) else {}
            yield from _diff_array(ArraySource(*a, key), ArraySource(*b, key), key, index, advance)
    if not same_index:
        yield from _diff_parameters(a, b)


def _diff_array(
    a: ArraySource, b: ArraySource, key: str, index: dict[str, IndexRecord], advance: Advance
) -> Iterator[Finding]:
    whole, by_name = Difference(), _ByName(index)
    for box, found in _compared(a, b, ((box, box) for box in _boxes(a))):
        advance(box.size * a.dtype.itemsize)
        for indices, one, other in found:
            positions = _positions(indices, box, a.shape)
            whole.add(one, other, positions)
            by_name.add(one, other, positions)
    if whole.count:
        yield Finding("array", key, shape=a.shape, bits=whole)
    for name, difference in by_name.found.items():
        yield Finding("parameter", f"{key}:{name}", shape=index[name].shape, bits=difference)


def _diff_parameters(a: Step, b: Step) -> Iterator[Finding]:
    """Named parameters by name, of the first flat array of each step."""
    one, other = _flat_source(a), _flat_source(b)
    for name in sorted(a[1].index.keys() | b[1].index.keys()):
        here, there = a[1].index.get(name), b[1].index.get(name)
        if here and there and one and other and (one.dtype, here.shape) == (other.dtype, there.shape):
            difference = Difference()
            for box, found in _compared(one, other, _interval(here, there, one.dtype.itemsize)):
                for indices, first, second in found:
                    difference.add(first, second, indices + (box.start[0] - here.start))
            if difference.count:
                yield Finding("parameter", name, shape=here.shape, bits=difference)
        else:
            yield Finding("parameter", name, _described(one, here), _described(other, there))


def _flat_source(step: Step) -> ArraySource | None:
    keys = flat_arrays(step[1].arrays)
    return ArraySource(*step, keys[0]) if keys else None


def _interval(a: IndexRecord, b: IndexRecord, itemsize: int) -> Iterator[tuple[Block, Block]]:
    """The elements of a parameter, piece by piece, as boxes of the two flat arrays."""
    for lo, hi in runs((a.stop - a.start,), itemsize):
        yield Block((a.start + lo,), (hi - lo,)), Block((b.start + lo,), (hi - lo,))


def _boxes(source: ArraySource) -> Iterator[Block]:
    """The array in boxes of WINDOW_BYTES at most, block by block as it was saved: these are read in one go."""
    for block in source.blocks:
        for lo, hi in runs(block.shape, source.dtype.itemsize):
            yield from flat.boxes_of(block, lo, hi)


def _compared(
    a: ArraySource, b: ArraySource, pairs: Iterable[tuple[Block, Block]]
) -> Iterator[tuple[Block, Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]]]:
    """For each pair of boxes, that of `a` and what differs: indices (C order, ascending), elements of a and of b."""
    for box, other in pairs:
        one, two = np.empty(box.shape, a.dtype), np.empty(other.shape, b.dtype)
        a.read(box, one)
        b.read(other, two)
        yield box, _differing(one.reshape(-1), two.reshape(-1))


def _differing(one: np.ndarray, two: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for lo in range(0, one.size, _ELEMENTS):
        part = slice(lo, lo + _ELEMENTS)
        indices = differing(one[part], two[part])
        if indices.size:
            yield indices + lo, one[part][indices], two[part][indices]


def _positions(indices: np.ndarray, box: Block, shape: tuple[int, ...]) -> np.ndarray:
    """Where elements of a box, by C order in it, lie in the array, by C order."""
    if not shape:
        return indices
    inside = np.unravel_index(indices, box.shape)
    return np.ravel_multi_index(tuple(i + start for i, start in zip(inside, box.start, strict=True)), shape)


class _ByName:
    """The differences of a flat array told by named parameter."""

    def __init__(self, index: dict[str, IndexRecord]) -> None:
        self.found: dict[str, Difference] = {}
        self._names = sorted(index, key=lambda name: index[name].start)
        self._starts = np.array([index[name].start for name in self._names], np.int64)
        self._stops = np.array([index[name].stop for name in self._names], np.int64)

    def add(self, a: np.ndarray, b: np.ndarray, positions: np.ndarray) -> None:
        """Elements that differ, and their positions in the flat array, ascending."""
        hit = np.flatnonzero((self._starts <= positions[-1]) & (self._stops > positions[0])) if self._names else ()
        for i in hit:
            lo, hi = np.searchsorted(positions, (self._starts[i], self._stops[i]))
            if lo < hi:
                difference = self.found.setdefault(self._names[i], Difference())
                difference.add(a[lo:hi], b[lo:hi], positions[lo:hi] - self._starts[i])


def _described(source: ArraySource | ArrayRecord | None, entry: IndexRecord | ArrayRecord | None) -> str:
    """Dtype and shape in words; nothing where one of the steps has nothing."""
    return "nothing" if source is None or entry is None else f"{np.dtype(source.dtype).str} {list(entry.shape)}"
