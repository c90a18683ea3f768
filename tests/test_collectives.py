"""Collectives against plain NumPy on the same numbers, with limits so small that every call is cut into pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpi_ckpt.comm import collectives
from mpi_ckpt.layout import shard_range


def limits(n: int) -> list[int]:
    """About twelve pieces of n elements (of one element when n is small), pieces of 5 or a little more, one piece."""
    return [1 + n // 12, 5 + n // 50, collectives.MAX_ELEMENTS]


def interval_counts(size: int) -> list[list[int]]:
    """Balanced, uneven, with empty ranks first, in the middle and last, and nothing at all."""
    balanced = [[b - a for a, b in (shard_range(n, size, r) for r in range(size))] for n in (1, 3, 7, 57, 1009)]
    steps = [
        [7 * r for r in range(size)],
        [7 * (size - r) - 7 for r in range(size)],
        [(r % 2) * 13 for r in range(size)],
    ]
    return [*balanced, *steps, [0] * size, [0] * (size - 1) + [11]]


def offset(counts: list[int], rank: int) -> int:
    return sum(counts[:rank])


@pytest.mark.mpi(ranks=[1, 4], timeout=60, unit="s")
def test_reduce_scatter_gives_each_rank_its_interval_of_the_sum(comm):
    for counts in interval_counts(comm.size):
        n = sum(counts)
        data = np.random.default_rng(n).integers(-1000, 1000, (comm.size, n)).astype(np.float32)  # sums are exact
        first = offset(counts, comm.rank)
        for limit in limits(n):
            flat, out = data[comm.rank].copy(), np.full(counts[comm.rank], np.nan, dtype=np.float32)
            collectives.reduce_scatter_sum(comm, flat, counts, out, limit=limit)
            np.testing.assert_array_equal(out, data.sum(axis=0)[first : first + out.size])
            np.testing.assert_array_equal(flat, data[comm.rank], err_msg="the input was changed")


class Watched:
    """A communicator that notes how many elements each collective moves, and passes everything on."""

    def __init__(self, comm):
        self.comm, self.size, self.rank, self.elements = comm, comm.size, comm.rank, []

    def Reduce_scatter(self, flat, mine, counts):  # noqa: N802 (mpi4py's names)
        self.elements.append(max(flat.size, sum(counts)))
        self.comm.Reduce_scatter(flat, mine, counts)

    def Allgatherv(self, send, receive):  # noqa: N802
        self.elements.append(max(receive[0].size, sum(receive[1])))
        self.comm.Allgatherv(send, receive)

    def Bcast(self, array, root):  # noqa: N802
        self.elements.append(array.size)
        self.comm.Bcast(array, root)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_no_call_moves_more_elements_than_the_limit(comm):
    counts = [57, 12]
    flat, mine = np.zeros(69, dtype=np.float32), np.zeros(counts[comm.rank], dtype=np.float32)
    for limit, pieces in ((5, [5] * 13 + [4]), (23, [23] * 3), (68, [68, 1]), (69, [69]), (70, [69])):
        for collective, arguments in (
            (collectives.reduce_scatter_sum, (flat, counts, mine)),
            (collectives.allgather_intervals, (flat, counts)),
            (collectives.broadcast, (flat,)),
        ):
            watched = Watched(comm)
            collective(watched, *arguments, limit=limit)
            assert watched.elements == pieces


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_reduce_scatter_adds_in_the_same_order_every_time(comm):
    counts = [b - a for a, b in (shard_range(30_080, comm.size, r) for r in range(comm.size))]
    flat = np.random.default_rng(comm.rank).standard_normal(30_080, dtype=np.float32)
    first, again = np.empty((2, counts[comm.rank]), dtype=np.float32)
    collectives.reduce_scatter_sum(comm, flat, counts, first)
    for _ in range(20):
        collectives.reduce_scatter_sum(comm, flat, counts, again)
        assert first.tobytes() == again.tobytes()


@pytest.mark.mpi(ranks=[1, 3], timeout=60, unit="s")
def test_allgather_copies_every_interval_bit_for_bit(comm):
    for dtype, counts in itertools.product(("f2", "f4", "f8", "u1"), interval_counts(comm.size)):
        n = sum(counts)
        expected = np.frombuffer(np.random.default_rng(n).bytes(n * np.dtype(dtype).itemsize), dtype)  # NaNs as well
        first = offset(counts, comm.rank)
        mine = slice(first, first + counts[comm.rank])
        for limit in limits(n):
            flat = np.zeros(n, dtype)
            flat[mine] = expected[mine]
            collectives.allgather_intervals(comm, flat, counts, limit=limit)
            assert flat.tobytes() == expected.tobytes()


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_broadcast_copies_any_shape_and_dtype_from_any_root(comm):
    dtypes, shapes = ("f2", "f4", "f8", "i8", "u1", "?"), ((), (0,), (0, 4), (7,), (57,), (3, 19))
    for dtype, shape, root, limit in itertools.product(dtypes, shapes, range(comm.size), limits(57)):
        expected = np.random.default_rng(root).integers(0, 100, shape).astype(dtype)
        array = expected.copy() if comm.rank == root else np.zeros(shape, dtype)
        collectives.broadcast(comm, array, root, limit=limit)
        np.testing.assert_array_equal(array, expected)


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_gather_rows_gives_all_ranks_every_rank_s_numbers(comm):
    rows = collectives.gather_rows(comm, [comm.rank + 0.1, np.nan, -1e300])
    expected = np.array([[r + 0.1, np.nan, -1e300] for r in range(comm.size)])
    np.testing.assert_array_equal(rows, expected)
    assert collectives.gather_rows(comm, []).shape == (comm.size, 0)


@pytest.mark.parametrize("columns", [1, 3])
def test_sums_are_taken_strictly_in_rank_order(columns):
    values = np.random.default_rng(7).standard_normal(1009) * 10.0 ** np.random.default_rng(8).integers(-9, 9, 1009)
    rows = np.stack([values] * columns, axis=1)
    expected = 0.0
    for value in values.tolist():
        expected += value
    assert float(np.sum(values)) != expected, "these values must tell the orders apart"
    assert collectives.sum_in_rank_order(rows).tolist() == [expected] * columns


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_arrays_that_do_not_fit_are_refused_on_every_rank(comm):
    counts = [4, 3]
    right, mine = np.zeros(7, dtype=np.float32), np.zeros(counts[comm.rank], dtype=np.float32)
    with pytest.raises(ValueError, match=r"expected contiguous \[7\]"):
        collectives.reduce_scatter_sum(comm, np.zeros(8, dtype=np.float32), counts, mine)
    with pytest.raises(ValueError, match="expected contiguous"):
        collectives.reduce_scatter_sum(comm, right, counts, np.zeros(9, dtype=np.float32))
    with pytest.raises(ValueError, match=r"expected contiguous \[7\]"):
        collectives.allgather_intervals(comm, np.zeros(14, dtype=np.float32)[::2], counts)
    with pytest.raises(ValueError, match="C-contiguous"):
        collectives.broadcast(comm, np.zeros((4, 6))[:, ::2])
