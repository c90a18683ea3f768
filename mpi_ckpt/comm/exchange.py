"""Sums of file parts that lie on different ranks, streamed: one engine for copies, parity, moves and rebuilding.

A *combination* says: each target part is a sum of source parts, with a factor each (what a product and a sum are is
the caller's, who passes `combine`). A copy is a combination of one source and one target; the parity of a stripe has
its data as sources; a lost piece is the target of pieces that survived.

Bytes are read once and sent once to each rank that needs them, in chunks; from where they lie, if that is in memory. A
rank has a few units (a chunk of a combination) under way at a time and needs no more memory than BUDGET, whatever the
files' sizes (combinations of more than 64 parts: an eighth of a MiB a part). All ranks go through the units in the same
order, and each has sent its bytes of a unit before it waits for those of others: there is no circle to get stuck in.
The volume is that of the ring reduce-scatter of SCR (each rank sends and receives what parity and partner schemes
must), without its chain of waits. A rank whose disk fails still sends and receives to the end; its error is raised
there, for the caller to agree on.
"""

from __future__ import annotations

import functools
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

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
class Part:
    """Bytes offset..offset+nbytes-1 of a file, which `rank` reads or writes.

    `file` is what the caller knows it by: anything that can be a key.
    """

    rank: int
    file: Any
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Combination:
    """targets[t] = the sum of factors[t][s] * sources[s]; a part that is shorter than a target is followed by zeros."""

    sources: tuple[Part, ...]
    targets: tuple[Part, ...]
    factors: tuple[tuple[int, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the longest target."""
        return max((part.nbytes for part in self.targets), default=0)


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


def exchange(comm: MPI.Comm | None, combinations: Sequence[Combination], port: Port, *, timeout: float) -> None:
    """**Collective.** Carry out the combinations; ranks that have parts in common pass the same list.

    `comm` must be used for nothing else meanwhile; None is a process without MPI that has every part, as rank 0.
    Raises what this rank's reads or writes raised first, once nobody waits for it any more; RankSilent when a rank lets
    this one wait for `timeout` seconds.
    """
    widest = max((len(c.sources) + len(c.targets) for c in combinations), default=1)
    rank = _Rank(comm, port, timeout, _chunk(widest), widest)
    try:
        for unit in _units(combinations, rank.chunk, rank.me):
            rank.begin(unit)
        rank.end()
    except BaseException:
        _abandoned.append(rank)
        raise
    if rank.failure is not None:
        raise rank.failure


@dataclass
class _Unit:
    """One chunk of a combination, from byte `lo` of each part on, and what is under way for it on this rank."""

    of: Combination
    lo: int
    chunk: int
    inputs: dict[int, np.ndarray] = field(default_factory=dict)  # by source
    reads: dict[int, Future[Any]] = field(default_factory=dict)  # by source
    messages: list[_Message] = field(default_factory=list)  # out and in
    buffers: list[np.ndarray] = field(default_factory=list)  # of the pool, those of the inputs
    outs: list[np.ndarray] = field(default_factory=list)  # of the pool, by target here
    is_sent: bool = False

    def length(self, part: Part) -> int:
        """Bytes of the part that lie in this chunk."""
        return min(max(part.nbytes - self.lo, 0), self.chunk)

    @functools.cached_property
    def takers(self) -> list[list[int]]:
        """For each source the ranks that need it, ascending: those whose target does not end before this chunk."""
        rows = [(t.rank, row) for t, row in zip(self.of.targets, self.of.factors, strict=True) if self.length(t)]
        return [
            sorted({rank for rank, row in rows if row[source]}) if self.length(part) else []
            for source, part in enumerate(self.of.sources)
        ]

    def sources_at(self, rank: int) -> list[tuple[int, Part]]:
        """What this rank reads of the unit."""
        return [(s, part) for s, part in enumerate(self.of.sources) if part.rank == rank and self.takers[s]]

    def arrivals_at(self, rank: int) -> list[tuple[int, Part]]:
        """What this rank is sent."""
        return [(s, part) for s, part in enumerate(self.of.sources) if part.rank != rank and rank in self.takers[s]]

    def targets_at(self, rank: int) -> list[tuple[Part, tuple[int, ...]]]:
        """What this rank writes, with the factors of its sum."""
        rows = zip(self.of.targets, self.of.factors, strict=True)
        return [(part, row) for part, row in rows if part.rank == rank and self.length(part)]


def _passes_on(unit: _Unit, arrivals: list[tuple[int, Part]], targets: list[tuple[Part, tuple[int, ...]]]) -> bool:
    """Whether what is written here is just what arrives: one part, as it is."""
    if len(arrivals) != 1 or len(targets) != 1:
        return False
    (source, part), (target, row) = arrivals[0], targets[0]
    return unit.length(part) == unit.length(target) and row == tuple(int(s == source) for s in range(len(row)))


def _units(combinations: Sequence[Combination], chunk: int, rank: int) -> Iterator[_Unit]:
    """A chunk of every combination that `rank` has a part in, then the next of every one: so all ranks stay busy."""
    mine = [c for c in combinations if any(part.rank == rank for part in (*c.sources, *c.targets))]
    for lo in range(0, max((c.nbytes for c in mine), default=0), chunk):
        yield from (_Unit(c, lo, chunk) for c in mine if lo < c.nbytes)


def _chunk(widest: int) -> int:
    chunk = _MOST
    while chunk > _LEAST and chunk * widest * _AHEAD > BUDGET:
        chunk //= 2
    return chunk


class _Rank:
    """What one rank does for its units, in their order, and the pool of buffers that it does it with."""

    def __init__(self, comm: MPI.Comm | None, port: Port, timeout: float, chunk: int, widest: int) -> None:
        self.failure: BaseException | None = None
        self.me = 0 if comm is None else comm.rank
        self.chunk = chunk
        self._comm: Any = comm
        self._port, self._timeout = port, timeout
        self._unmade = max(BUDGET // chunk, _AHEAD * widest)  # buffers
        self._free: list[np.ndarray] = []
        self._begun: deque[_Unit] = deque()
        self._writing: deque[tuple[np.ndarray, Future[Any]]] = deque()

    def begin(self, unit: _Unit) -> None:
        """Start to read what is read here, and to receive what is needed here; end older units first to make room."""
        views = {s: self._port.view(part, unit.lo, unit.length(part)) for s, part in unit.sources_at(self.me)}
        arrivals, targets = unit.arrivals_at(self.me), unit.targets_at(self.me)
        passes = _passes_on(unit, arrivals, targets)
        self._make_room(sum(view is None for view in views.values()) + len(arrivals) + (0 if passes else len(targets)))
        for source, part in arrivals:
            buffer = unit.inputs[source] = self._take()
            unit.messages.append((part.rank, self._comm.Irecv(buffer[: unit.length(part)], source=part.rank)))
            (unit.outs if passes else unit.buffers).append(buffer)
        for source, view in views.items():
            if view is None:
                part, view = unit.of.sources[source], self._take()
                unit.reads[source] = self._port.read(part, unit.lo, view, unit.length(part))
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
        for source, part in unit.sources_at(self.me):
            data = unit.inputs[source][: unit.length(part)]
            others = [rank for rank in unit.takers[source] if rank != self.me]
            unit.messages += [(rank, self._comm.Isend(data, dest=rank)) for rank in others]
        unit.is_sent = True

    def _finish_oldest(self) -> None:
        """Wait for what arrives and leaves, start to write the sums, and give the buffers back."""
        unit = self._begun[0]
        if not unit.is_sent:
            self._send(unit)
        self._wait(unit.messages)
        for (part, row), out in zip(unit.targets_at(self.me), unit.outs, strict=True):
            self._sum(unit, part, row, out)
            self._writing.append((out, self._port.write(part, unit.lo, out, unit.length(part))))
        self._free += unit.buffers
        self._begun.popleft()

    def _sum(self, unit: _Unit, part: Part, row: tuple[int, ...], out: np.ndarray) -> None:
        length = unit.length(part)
        terms = [(factor, s) for s, factor in enumerate(row) if factor and s in unit.inputs]
        inputs = [unit.inputs[s][: min(unit.length(unit.of.sources[s]), length)] for _, s in terms]
        if not any(data is out for data in unit.inputs.values()):  # else it has arrived in its place
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
        return np.frombuffer(mmap.mmap(-1, self.chunk), np.uint8)  # begins on a page, as direct I/O wants it

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
