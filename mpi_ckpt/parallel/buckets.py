"""Gradients are reduced in buckets while the backward still computes the others (PyTorch DDP, arXiv:2006.15704, 3.2.3).

The backward goes from the last layer to the first, so the flat vector becomes ready from its end. A rank keeps its one
interval of it: a bucket's counts are its intersections with the ranks' intervals, most of them zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpi_ckpt.comm.collectives import start_reduce_scatter_sum

if TYPE_CHECKING:
    from mpi4py import MPI

BUCKET = 1 << 18  # elements that a request has at least: 1 MiB, below which its fixed cost is what counts


class OverlappedReduction:
    """The sum of `flat` [n] over the ranks of `comm`, each rank's interval (`counts`) of it into `out`, in buckets.

    A bucket may be summed in another order than the whole by one MPI_Reduce_scatter: the last bits may differ from it.
    They are the same in every run with the same ranks, library and buckets. (On 4 ranks MPICH 5 gives the bits of the
    whole, Open MPI 5 does not in 40 % of the elements.)
    """

    def __init__(
        self, comm: MPI.Comm, flat: np.ndarray, counts: Sequence[int], out: np.ndarray, bucket: int = BUCKET
    ) -> None:
        self._comm, self._flat, self._counts, self._out, self._bucket = comm, flat, counts, out, bucket
        self._ready = self._begun = flat.size  # all from here on is ready; its reduction has begun
        self._requests: list[MPI.Request] = []

    def ready(self, start: int, stop: int) -> None:
        """**Collective.** `flat[start:stop]` is final. Intervals come from the last to the first, without gaps.

        Raises ValueError for any other.
        """
        if stop != self._ready or not 0 <= start <= stop:
            raise ValueError(f"interval: found [{start}, {stop}); expected one that ends at {self._ready}")
        self._ready = start
        if self._begun - start >= self._bucket:
            self._begin()
        # A message advances only while its rank is inside MPI: without these looks all would wait for `finish`.
        self._requests = [request for request in self._requests if not request.Test()]

    def finish(self) -> None:
        """**Collective.** Reduce what has not begun yet and wait for all: `out` is complete, a new round begins."""
        self._ready = 0
        self._begin()
        for request in self._requests:
            request.Wait()
        self._requests.clear()
        self._ready = self._begun = self._flat.size

    def _begin(self) -> None:
        part = self._ready, self._begun
        self._requests += start_reduce_scatter_sum(self._comm, self._flat, self._counts, self._out, *part)
        self._begun = self._ready
