"""Sums of file parts that lie on different ranks, streamed: one engine for copies, parity, moves and rebuilding.

What a product and a sum are is the caller's, who passes `combine`. Bytes are read once and sent once to each rank that
needs them, in chunks; from where they lie, if that is in memory. A rank has a few units (a chunk of a combination)
under way at a time and needs no more memory than BUDGET, whatever the files' sizes (combinations of more than 64 parts:
3/16 of a MiB a part). All ranks go through the units in the same order, and each has sent its bytes of a unit before
it waits for those of others: there is no circle to get stuck in. The volume is that of the ring reduce-scatter of SCR
(each rank sends and receives what parity and partner schemes must), without its chain of waits. A rank whose disk fails
still sends and receives to the end; its error is raised there, for the caller to agree on.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpi_ckpt.comm.combination import Chunk, Combination, Part, chunks
from mpi_ckpt.errors import RankSilent

if TYPE_CHECKING:
    from mpi4py import MPI

BUDGET = 12 << 20  # bytes of buffers a rank
_LEAST, _MOST = 64 << 10, 1 << 20  # bytes of a chunk
_AHEAD = 3  # units that there is room for, at least: one each that is read, sent, and summed and written
_UNDER_WAY = 16  # units, at most
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between looks: who waits leaves the processor to others

_Message: TypeAlias = "tuple[int, MPI.Request]"  # the other rank, and what says when it is through

_abandoned: list[_Rank] = []  # those whose partners fell silent: MPI may still touch their buffers


@dataclass(frozen=True)
class Port:
    """How the exchange reaches bytes; it knows no files. `read` and `write` only start the work, the Future waits.

    `view(part, lo, n)` gives the bytes lo..lo+n-1 of a part where they lie in memory, uint8, or None: then
    `read(part, lo, buffer, n)` puts them into `buffer`. `write(part, lo, buffer, n)` takes bytes. Buffers are
    page-aligned uint8 of whole pages, of which `write` may change what lies beyond n. A part's writes come in ascending
    order. `combine(out, factors, inputs)` sums uint8 arrays.
    """

    view: Callable[[Part, int, int], np.ndarray | None]
    read: Callable[[Part, int, np.ndarray, int], Future[Any]]
    write: Callable[[Part, int, np.ndarray, int], Future[Any]]
    combine: Callable[[np.ndarray, Sequence[int], Sequence[np.ndarray]], None]


def exchange(
    comm: MPI.Comm | None, combinations: Sequence[Combination], port: Port, *, timeout: float, tag: int = 0
) -> None:
    """**Collective.** Carry out the combinations; ranks that have parts in common pass the same list.

    No other messages on `comm` have this `tag`; None is a process without MPI that has every part, as rank 0.
    Raises what this rank's reads or writes raised first, once nobody waits for it any more; RankSilent when a rank lets
    this one wait for `timeout` seconds.
    """
    widest = max((len(c.sources) + len(c.targets) for c in combinations), default=1)
    rank = _Rank(comm, tag, port, timeout, _chunk_bytes(widest), widest)
    try:
        for chunk in chunks(combinations, rank.chunk_bytes, rank.me):
            rank.begin(chunk)
        rank.end()
    except BaseException:
        _abandoned.append(rank)
        raise
    if rank.failure is not None:
        raise rank.failure


@dataclass
class _Unit:
    """A chunk of a combination, and what is under way for it on this rank."""

    chunk: Chunk
    inputs: dict[int, np.ndarray] = field(default_factory=dict)  # by source
    reads: dict[int, Future[Any]] = field(default_factory=dict)  # by source
    messages: list[_Message] = field(default_factory=list)  # out and in
    buffers: list[np.ndarray] = field(default_factory=list)  # of the pool, those of the inputs
    outs: list[np.ndarray] = field(default_factory=list)  # of the pool, by target here
    is_sent: bool = False


def _chunk_bytes(widest: int) -> int:
    nbytes = _MOST
    while nbytes > _LEAST and nbytes * widest * _AHEAD > BUDGET:
        nbytes //= 2
    return nbytes


class _Rank:
    """What one rank does for its units, in their order, and the pool of buffers that it does it with."""

    def __init__(
        self, comm: MPI.Comm | None, tag: int, port: Port, timeout: float, chunk_bytes: int, widest: int
    ) -> None:
        self.failure: BaseException | None = None
        self.me = 0 if comm is None else comm.rank
        self.chunk_bytes = chunk_bytes
        self._comm: Any = comm
        self._tag = tag
        self._port, self._timeout = port, timeout
        self._unmade = max(BUDGET // chunk_bytes, _AHEAD * widest)  # buffers
        self._free: list[np.ndarray] = []
        self._begun: deque[_Unit] = deque()
        self._writing: deque[tuple[np.ndarray, Future[Any]]] = deque()

    def begin(self, chunk: Chunk) -> None:
        """Start to read what is read here, and to receive what is needed here; end older units first to make room."""
        unit, me = _Unit(chunk), self.me
        views = {s: self._port.view(part, chunk.lo, chunk.length(part)) for s, part in chunk.sources_at(me)}
        arrivals, targets, passes = chunk.arrivals_at(me), chunk.targets_at(me), chunk.passes_on(me)
        self._make_room(sum(view is None for view in views.values()) + len(arrivals) + (0 if passes else len(targets)))
        for source, part in arrivals:
            buffer = unit.inputs[source] = self._take()
            request = self._comm.Irecv(buffer[: chunk.length(part)], source=part.rank, tag=self._tag)
            unit.messages.append((part.rank, request))
            (unit.outs if passes else unit.buffers).append(buffer)
        for source, view in views.items():
            if view is None:
                part, view = chunk.of.sources[source], self._take()
                unit.reads[source] = self._port.read(part, chunk.lo, view, chunk.length(part))
                unit.buffers.append(view)
            unit.inputs[source] = view
        if not passes:
            unit.outs += [self._take() for _ in targets]
        self._begun.append(unit)
        self._send_what_is_read()

    def end(self) -> None:
        """End all that is under way."""
        while self._begun:
            self._finish_oldest()
        while self._writing:
            self._release_oldest()

    def _send_what_is_read(self) -> None:
        """Of the units in their order, without a wait."""
        for unit in self._begun:
            if not unit.is_sent:
                if not all(read.done() for read in unit.reads.values()):
                    return
                self._send(unit)

    def _send(self, unit: _Unit) -> None:
        """Send what was read to those who need it. After a failure they get bytes that nobody will use."""
        for read in unit.reads.values():
            self._settle(read)
        for source, part in unit.chunk.sources_at(self.me):
            data = unit.inputs[source][: unit.chunk.length(part)]
            others = [rank for rank in unit.chunk.takers[source] if rank != self.me]
            unit.messages += [(rank, self._comm.Isend(data, dest=rank, tag=self._tag)) for rank in others]
        unit.is_sent = True

    def _finish_oldest(self) -> None:
        """Wait for what arrives and leaves, start to write the sums, and give the buffers back."""
        unit = self._begun[0]
        if not unit.is_sent:
            self._send(unit)
        self._wait(unit.messages)
        chunk = unit.chunk
        for (part, row), out in zip(chunk.targets_at(self.me), unit.outs, strict=True):
            if not chunk.passes_on(self.me):
                self._sum(unit, part, row, out)
            self._writing.append((out, self._port.write(part, chunk.lo, out, chunk.length(part))))
        self._free += unit.buffers
        self._begun.popleft()

    def _sum(self, unit: _Unit, part: Part, row: tuple[int, ...], out: np.ndarray) -> None:
        chunk, length = unit.chunk, unit.chunk.length(part)
        terms = [(factor, s) for s, factor in enumerate(row) if factor and s in unit.inputs]
        inputs = [unit.inputs[s][: min(chunk.length(chunk.of.sources[s]), length)] for _, s in terms]
        self._port.combine(out[:length], [factor for factor, _ in terms], inputs)

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _make_room(self, buffers: int) -> None:
        """End what is under way, the oldest first, until so many buffers are free, and one more unit may begin."""
        while len(self._begun) == _UNDER_WAY or len(self._free) + self._unmade < buffers:
            if self._writing and (self._writing[0][1].done() or not self._begun):
                self._release_oldest()
            else:
                self._finish_oldest()

    def _take(self) -> np.ndarray:
        if self._free:
            return self._free.pop()
        self._unmade -= 1
        return np.frombuffer(mmap.mmap(-1, self.chunk_bytes), np.uint8)  # begins on a page, as direct I/O wants it

    def _release_oldest(self) -> None:
        """Wait until the buffer that is written for longest is free."""
        buffer, write = self._writing.popleft()
        self._settle(write)
        self._free.append(buffer)

    def _settle(self, work: Future[Any]) -> None:
        try:
            work.result()
        except Exception as error:
            self.failure = self.failure or error

    def _wait(self, messages: Iterable[_Message]) -> None:
        for rank, request in messages:
            deadline, pause = time.monotonic() + self._timeout, _FIRST_PAUSE
            while not request.Test():
                if time.monotonic() >= deadline:
                    raise _silence(rank, self._timeout)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                self._send_what_is_read()


def _silence(rank: int, seconds: float) -> RankSilent:
    return RankSilent(
        f"rank {rank} neither sends nor takes its part of the redundancy",
        rank=rank,
        found=f"silence for {seconds:g} s",
        expected="the next bytes",
        action="See whether that rank still runs and its disk answers; raise `timeout` if it is only slow.",
    )
