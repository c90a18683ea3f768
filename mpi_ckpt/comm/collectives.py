"""Collectives on array buffers: thin, chunked, and the same for every MPI.

A flat array of n elements is dealt to the ranks in intervals: `counts[r]` elements for rank r, one after the other;
counts may be uneven or zero. Some MPI libraries fail above 2^31 - 1 elements a call, so every call here moves at most
`limit` elements. Every rank passes the same `counts` and `limit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_ELEMENTS = 2**30  # a call; half of what a C int counts, so that a library's own sums of two counts fit as well


def reduce_scatter_sum(
    comm: MPI.Comm, flat: np.ndarray, counts: Sequence[int], out: np.ndarray, *, limit: int = MAX_ELEMENTS
) -> None:
    """**Collective.** Sum `flat` over the ranks; each rank receives its own interval of the sum.

    `flat` float32 [n] (any dtype that MPI can add), n = sum(counts); `out` the same dtype, [counts[rank]]. The order of
    the additions is the MPI library's: the same in every run with the same library, ranks and placement.
    Raises ValueError when an array's shape does not fit `counts`.
    """
    _check_flat(flat, sum(counts))
    _check_flat(out, counts[comm.rank])
    first = sum(counts[: comm.rank])
    for bounds in _pieces(counts, limit):
        mine = out[bounds[comm.rank] - first : bounds[comm.rank + 1] - first]
        comm.Reduce_scatter(flat[bounds[0] : bounds[-1]], mine, [b - a for a, b in pairwise(bounds)])


def start_reduce_scatter_sum(
    comm: MPI.Comm,
    flat: np.ndarray,
    counts: Sequence[int],
    out: np.ndarray,
    start: int,
    stop: int,
    *,
    limit: int = MAX_ELEMENTS,
) -> list[MPI.Request]:
    """**Collective.** Begin what `reduce_scatter_sum` does for the elements `start` to `stop` of `flat` alone.

    The arguments are those of `reduce_scatter_sum`; each rank receives what of its own interval lies within, which may
    be nothing. Returns at once; neither those elements of `flat` nor `out` may be touched until all requests complete.
    """
    first = sum(counts[: comm.rank])
    requests = []
    for bounds in _pieces(counts, limit, start, stop):
        mine = out[bounds[comm.rank] - first : bounds[comm.rank + 1] - first]
        parts = [b - a for a, b in pairwise(bounds)]
        requests.append(comm.Ireduce_scatter(flat[bounds[0] : bounds[-1]], mine, parts))
    return requests


def allreduce_sum(comm: MPI.Comm, array: np.ndarray, *, limit: int = MAX_ELEMENTS) -> None:
    """**Collective.** In place: the contiguous `array` (any shape and dtype that MPI can add) summed over the ranks.

    The order of the additions is the MPI library's, as in `reduce_scatter_sum`.
    """
    from mpi4py import MPI

    flat = array.reshape(-1)
    for low in range(0, flat.size, limit):
        comm.Allreduce(MPI.IN_PLACE, flat[low : low + limit])


def allgather_intervals(comm: MPI.Comm, flat: np.ndarray, counts: Sequence[int], *, limit: int = MAX_ELEMENTS) -> None:
    """**Collective.** In place: each rank's interval of `flat` [n] is copied to all ranks, bit for bit.

    Any dtype of 1, 2, 4 or 8 bytes. Raises ValueError when `flat` does not fit `counts`.
    """
    from mpi4py import MPI

    _check_flat(flat, sum(counts))
    words = _as_words(flat)
    for bounds in _pieces(counts, limit):
        piece = words[bounds[0] : bounds[-1]]
        comm.Allgatherv(MPI.IN_PLACE, [piece, [b - a for a, b in pairwise(bounds)]])


def broadcast(comm: MPI.Comm, array: np.ndarray, root: int = 0, *, limit: int = MAX_ELEMENTS) -> None:
    """**Collective.** In place: rank `root`'s contiguous `array` (1, 2, 4 or 8 bytes an element) on all ranks."""
    words = _as_words(array)
    for low in range(0, words.size, limit):
        comm.Bcast(words[low : low + limit], root)


def gather_rows(comm: MPI.Comm, row: Sequence[float] | np.ndarray) -> np.ndarray:
    """**Collective.** Every rank's k numbers on all ranks: float64 [size, k], row r from rank r."""
    mine = np.array(row, dtype=np.float64)
    rows = np.empty((comm.size, mine.size), dtype=np.float64)
    comm.Allgather(mine, rows)
    return rows


def sum_in_rank_order(rows: np.ndarray) -> np.ndarray:
    """**Local.** Sum float64 [size, k] over the ranks: ((row 0 + row 1) + row 2) + ... -> float64 [k].

    Neither the MPI library's algorithm nor the placement of the ranks changes a bit, as they may in MPI_Allreduce.
    """
    return np.add.accumulate(rows, axis=0)[-1]  # accumulate is sequential by definition; np.sum is not


def _pieces(counts: Sequence[int], limit: int, start: int = 0, stop: int | None = None) -> Iterator[list[int]]:
    """Cut the flat array, or its elements `start` to `stop`, into pieces of at most `limit` elements.

    A piece is the list of size + 1 boundaries of the ranks' intervals inside it: rank r's part is [b[r], b[r + 1]).
    """
    offsets = [0, *accumulate(counts)]
    stop = offsets[-1] if stop is None else stop
    for low in range(start, stop, limit):
        high = min(low + limit, stop)
        yield [min(max(offset, low), high) for offset in offsets]


def _as_words(array: np.ndarray) -> np.ndarray:
    """The array's bytes as flat unsigned integers: a copy needs no arithmetic, and not every MPI has a float16."""
    if not array.flags.c_contiguous:
        raise ValueError(f"a collective in place needs a C-contiguous array; found strides {array.strides}")
    return array.reshape(-1).view(f"u{array.itemsize}")


def _check_flat(array: np.ndarray, size: int) -> None:
    if array.shape != (size,) or not array.flags.c_contiguous:
        raise ValueError(
            f"found an array of shape {array.shape}, strides {array.strides}; expected contiguous [{size}]"
        )
