"""Between an array of any shape and strides and its elements in C order, the order of the file.

A run of consecutive elements in C order is cut into a few boxes (at most 2 * ndim - 1), and boxes are what NumPy copies
fast. Nothing here needs memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpi_ckpt.layout import Block, overlap


def boxes(shape: tuple[int, ...], lo: int, hi: int) -> Iterator[Block]:
    """The boxes, in C order, that hold the elements lo..hi-1 (in C order) of an array of `shape`."""
    if lo >= hi:
        return
    if not shape:
        yield Block((), ())
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, skip = divmod(lo, row)
    last, rest = divmod(hi, row)
    if first == last:
        yield from _in_row(first, boxes(inner, skip, rest))
        return
    if skip:
        yield from _in_row(first, boxes(inner, skip, row))
        first += 1
    if first < last:
        yield Block((first,) + (0,) * len(inner), (last - first, *inner))
    if rest:
        yield from _in_row(last, boxes(inner, 0, rest))


def _in_row(index: int, inner: Iterator[Block]) -> Iterator[Block]:
    return (Block((index, *box.start), (1, *box.shape)) for box in inner)


def gather(array: np.ndarray, lo: int, out: np.ndarray) -> None:
    """Copy elements lo.. of `array` (in C order) to all of `out` (1-d, same type, any byte order)."""
    whole = Block((0,) * array.ndim, array.shape)
    at = 0
    for box in boxes(array.shape, lo, lo + out.size):
        np.copyto(out[at : at + box.size].reshape(box.shape), array[box.within(whole)])
        at += box.size


def boxes_of(block: Block, lo: int, hi: int) -> Iterator[Block]:
    """`boxes` of a block's elements lo..hi-1, placed in the global array."""
    for box in boxes(block.shape, lo, hi):
        yield Block(tuple(a + b for a, b in zip(box.start, block.start, strict=True)), box.shape)


def scatter(elements: np.ndarray, lo: int, block: Block, region: Block, out: np.ndarray) -> None:
    """Copy what lies in `region` of `elements` (1-d: lo.. of `block` in C order) to `out`, which holds `region`."""
    at = 0
    for box in boxes_of(block, lo, lo + elements.size):
        piece = elements[at : at + box.size].reshape(box.shape)
        part = overlap(box, region)
        if part is not None:
            out[part.within(region)] = piece[part.within(box)]
        at += box.size
