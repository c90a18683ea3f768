"""The ranks that share one model, and where the part of one of them lies in the flat space of the whole.

Vectors of a tensor rank are *local*: its parts of all parameters, one after the other. Checkpoints are *global*: all
tensor ranks' parts lie in the flat space [P] of the whole model, so that they restore on any other mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpi_ckpt.comm.collectives import allreduce_sum, broadcast, gather_rows
from mpi_ckpt.comm.stopwatch import Stopwatch

if TYPE_CHECKING:
    from mpi4py import MPI


class TensorGroup:
    """The ranks of `comm` share one model; None is one rank alone. What the model asks of them is `allreduce`.

    `watch` adds up the seconds that this rank has spent in it.
    """

    def __init__(self, comm: MPI.Comm | None = None) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank() if comm else 0
        self.size: int = comm.Get_size() if comm else 1
        self.watch = Stopwatch()

    def allreduce(self, array: np.ndarray) -> None:
        """**Collective.** In place: `array`, contiguous, becomes its sum over the ranks."""
        if self._comm is not None:
            with self.watch:
                allreduce_sum(self._comm, array)

    def broadcast(self, array: np.ndarray) -> None:
        """**Collective.** In place: rank 0's contiguous `array`."""
        if self._comm is not None:
            broadcast(self._comm, array)

    def gather_rows(self, row: Sequence[float] | np.ndarray) -> np.ndarray:
        """**Collective.** Every rank's k numbers: float64 [size, k], row r from rank r."""
        return gather_rows(self._comm, row) if self._comm is not None else np.array([row], dtype=np.float64)

    def close(self) -> None:
        """**Collective.** Free the communicator."""
        if self._comm is not None:
            self._comm.Free()


class Piece(NamedTuple):
    """`size` elements from `local` on in a rank's vector, which lie from `whole` on in the flat space of the model."""

    local: int
    whole: int
    size: int
    shared: bool  # the same values at the same local place on all tensor ranks


class LocalPart:
    """What this tensor rank holds of the flat space [`numel`]: (whole, size, shared) of each piece, in local order."""

    def __init__(self, numel: int, pieces: Iterable[tuple[int, int, bool]]) -> None:
        self.numel = numel
        self.size = 0  # of the local vector
        self._pieces: list[Piece] = []
        for whole, size, shared in pieces:
            self._pieces.append(Piece(self.size, whole, size, shared))
            self.size += size

    @classmethod
    def all_of(cls, numel: int) -> LocalPart:
        """The whole flat space, of one rank alone."""
        return cls(numel, [(0, numel, False)])

    def within(self, start: int, stop: int) -> list[Piece]:
        """The pieces of the local interval [start, stop), `local` counted from `start`; none is empty."""
        found = []
        for piece in self._pieces:
            low, high = max(piece.local, start), min(piece.local + piece.size, stop)
            if low < high:
                found.append(Piece(low - start, piece.whole + low - piece.local, high - low, piece.shared))
        return found


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """**Local.** `pieces` with those joined that are neighbours in both spaces, shared or not."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.local + last.size, last.whole + last.size) == (piece.local, piece.whole):
            joined[-1] = Piece(last.local, last.whole, last.size + piece.size, last.shared and piece.shared)
        else:
            joined.append(piece)
    return joined
