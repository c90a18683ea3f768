"""A file as a stream of pieces that are read before they are asked for, in constant memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mpi_ckpt.storage import direct
from mpi_ckpt.storage.staging import SLOT_BYTES, SLOTS, Lane, Slot

T = TypeVar("T")
_AHEAD = SLOTS - 2  # the others: one in the consumer's hands, one whose jobs may still be running


@dataclass(frozen=True)
class Range(Generic[T]):
    """Bytes lo..hi-1 of a file, at most SLOT_BYTES, and what the reader of it wants to remember."""

    lo: int
    hi: int
    tag: T


@dataclass(frozen=True)
class Piece(Generic[T]):
    """What a range holds: uint8, shorter than the range only at the end of the file. Jobs on it belong into `slot`."""

    range: Range[T]
    data: np.ndarray
    slot: Slot


def whole_file(nbytes: int) -> Iterator[Range[None]]:
    """The ranges that make a file of `nbytes`."""
    return (Range(lo, min(lo + SLOT_BYTES, nbytes), None) for lo in range(0, nbytes, SLOT_BYTES))


def read_ahead(fd: int, ranges: Iterable[Range[T]], slots: Sequence[Slot], lanes: Sequence[Lane]) -> Iterator[Piece[T]]:
    """The ranges' pieces in order, read by `lanes`. A piece's data are valid until the next one is taken.

    Jobs that are put into the piece's slot may use the data longer: the slot is not read into before they are done.
    """
    waiting: deque[tuple[Range[T], Slot, Future[int]]] = deque()
    for i, wanted in enumerate(ranges):
        slot = slots[i % len(slots)]
        slot.settle()
        lane = lanes[i % len(lanes)]
        waiting.append((wanted, slot, lane.submit(direct.read_into, fd, slot.buffer, wanted.lo, wanted.hi - wanted.lo)))
        if len(waiting) > _AHEAD:
            yield _take(waiting)
    while waiting:
        yield _take(waiting)


def _take(waiting: deque[tuple[Range[T], Slot, Future[int]]]) -> Piece[T]:
    wanted, slot, read = waiting.popleft()
    return Piece(wanted, slot.buffer[: read.result()], slot)
