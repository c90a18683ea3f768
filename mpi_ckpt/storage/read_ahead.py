"""A file as a stream of pieces that are read before they are asked for, in constant memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mpi_ckpt.storage.places import Reader
from mpi_ckpt.storage.staging import SLOT_BYTES, SLOTS, Lane, Slot

T = TypeVar("T")
_AHEAD = SLOTS - 2  # the others: one in the consumer's hands, one whose jobs may still be running


@dataclass(frozen=True)
class Range(Generic[T]):
    """Bytes lo..hi-1 of a file, and what the reader of it wants to remember.

    They go into `memory` (uint8, whole pages that begin on one), or, at most SLOT_BYTES of them, into a slot.
    """

    lo: int
    hi: int
    tag: T
    memory: np.ndarray | None = None


@dataclass(frozen=True)
class Piece(Generic[T]):
    """What a range holds: uint8, shorter than the range only at the end of the file. Jobs on it belong into `slot`."""

    range: Range[T]
    data: np.ndarray
    slot: Slot


def stretch(begin: int, end: int) -> Iterator[Range[None]]:
    """The ranges, one slot each, that make the bytes begin..end-1 of a file; `begin` on a page."""
    return (Range(lo, min(lo + SLOT_BYTES, end), None) for lo in range(begin, end, SLOT_BYTES))


def read_ahead(
    reader: Reader, ranges: Iterable[Range[T]], slots: Sequence[Slot], lanes: Sequence[Lane]
) -> Iterator[Piece[T]]:
    """The ranges' pieces in order, read by `lanes`. A piece's data are valid until the next one is taken.

    Jobs that are put into the piece's slot may use the data longer: the slot is not read into before they are done.
    """
    waiting: deque[tuple[Range[T], Slot, Future[int]]] = deque()
    free = itertools.cycle(slots)
    for wanted, lane in zip(ranges, itertools.cycle(lanes), strict=False):
        slot = next(free) if wanted.memory is None else Slot(wanted.memory)
        slot.settle()
        waiting.append((wanted, slot, lane.submit(reader.read_into, slot.buffer, wanted.lo, wanted.hi - wanted.lo)))
        if len(waiting) > _AHEAD:
            yield _take(waiting)
    while waiting:
        yield _take(waiting)


def _take(waiting: deque[tuple[Range[T], Slot, Future[int]]]) -> Piece[T]:
    wanted, slot, read = waiting.popleft()
    return Piece(wanted, slot.buffer[: read.result()], slot)
