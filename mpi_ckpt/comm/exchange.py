"""Sums of file parts that lie on different ranks, streamed: one engine for copies, parity, moves and rebuilding.

A *combination* says: each target part is a sum of source parts, with a factor each (what a product and a sum are is
the caller's, who passes `combine`). A copy is a combination of one source and one target; the parity of a stripe has
its data as sources; a lost piece is the target of pieces that survived.

Bytes are read once and sent once to each rank that needs them, in chunks. A rank has a few units (a chunk of a
combination) under way at a time and needs no more memory than BUDGET, whatever the files' sizes (combinations of more
than 48 parts: a quarter of a MiB a part). All ranks go through the units in the same order, and each has sent its bytes
of a unit before it waits for those of others: there is no circle to get stuck in. The volume is that of the ring
reduce-scatter of SCR (each rank sends and receives what parity and partner schemes must), without its chain of waits.
A rank whose disk fails still sends and receives to the end; its error is raised there, for the caller to agree on.
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
_LEAST_AHEAD, _MOST_AHEAD = 3, 16  # units under way: at least one each that is read, sent, and summed and written
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between looks: who waits leaves the processor to others

_Message: TypeAlias = "tuple[int, MPI.Request]"  # the other rank, and what says when it is through

_abandoned: list[Any] = []  # messages of ranks that fell silent: MPI may still touch their buffers


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
    """How the exchange reaches bytes; it knows no files. Both calls only start the work, the Future waits for it.

    `read(part, lo, buffer, n)` puts the bytes lo..lo+n-1 of a part into `buffer`; `write(part, lo, buffer, n)` takes
    them. Buffers are page-aligned uint8 of whole pages, of which `write` may change what lies beyond n. A part's writes
    come in ascending order. `combine(out, factors, inputs)` sums uint8 arrays.
    """

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
    chunk = _chunk(widest)
    ahead = max(_LEAST_AHEAD, min(_MOST_AHEAD, BUDGET // (widest * chunk) - 1))
    rank = _Rank(comm, port, timeout, chunk, limit=(ahead + 1) * widest)
    begun, sent = deque[_Unit](), deque[_Unit]()
    try:
        for unit in _units(combinations, chunk, rank.me):
            rank.begin(unit)
            begun.append(unit)
            if len(begun) > ahead - ahead // 2:
                rank.send(begun[0])
                sent.append(begun.popleft())
            if len(sent) > ahead // 2:
                rank.finish(sent.popleft())
        for unit in begun:
            rank.send(unit)
        for unit in (*sent, *begun):
            rank.finish(unit)
        rank.drain()
    except BaseException:
        _abandoned.append((rank, begun, sent))
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
    reads: dict[int, Future[Any]] = field(default_factory=dict)
    arrivals: dict[int, _Message] = field(default_factory=dict)
    sent: dict[int, list[_Message]] = field(default_factory=dict)

    def length(self, part: Part) -> int:
        """Bytes of the part that lie in this chunk."""
        return min(max(part.nbytes - self.lo, 0), self.chunk)

    @functools.cached_property
    def takers(self) -> list[list[int]]:
        """For each source the ranks that need it, ascending: those whose target does not end before this chunk."""
        rows = [(t.rank, row) for t, row in zip(self.of.targets, self.of.factors, strict=True) if self.length(t)]
        return [sorted({rank for rank, row in rows if row[source]}) for source in range(len(self.of.sources))]


def _units(combinations: Sequence[Combination], chunk: int, rank: int) -> Iterator[_Unit]:
    """A chunk of every combination that `rank` has a part in, then the next of every one: so all ranks stay busy."""
    mine = [c for c in combinations if any(part.rank == rank for part in (*c.sources, *c.targets))]
    for lo in range(0, max((c.nbytes for c in mine), default=0), chunk):
        yield from (_Unit(c, lo, chunk) for c in mine if lo < c.nbytes)


def _chunk(widest: int) -> int:
    chunk = _MOST
    while chunk > _LEAST and chunk * widest * (_LEAST_AHEAD + 1) > BUDGET:
        chunk //= 2
    return chunk


class _Rank:
    """What one rank does for its units, and at most `limit` buffers that it does it with."""

    def __init__(self, comm: MPI.Comm | None, port: Port, timeout: float, chunk: int, limit: int) -> None:
        self.failure: BaseException | None = None
        self.me = 0 if comm is None else comm.rank
        self._comm: Any = comm
        self._port, self._timeout, self._chunk = port, timeout, chunk
        self._unmade = limit
        self._free: list[np.ndarray] = []
        self._busy: deque[tuple[np.ndarray, list[_Message], Future[Any] | None]] = deque()  # and what has to end first

    def begin(self, unit: _Unit) -> None:
        """Start to read what is read here, and to receive what is needed here."""
        for source, (part, takers) in enumerate(zip(unit.of.sources, unit.takers, strict=True)):
            length = unit.length(part)
            if not length or not takers or self.me not in (part.rank, *takers):
                continue
            buffer = unit.inputs[source] = self._take()
            if part.rank == self.me:
                unit.reads[source] = self._port.read(part, unit.lo, buffer, length)
            else:
                unit.arrivals[source] = part.rank, self._comm.Irecv(buffer[:length], source=part.rank)

    def send(self, unit: _Unit) -> None:
        """Send what was read to those who need it. After a failure they get bytes that nobody will use."""
        for source, read in unit.reads.items():
            self._settle(read)
            data = unit.inputs[source][: unit.length(unit.of.sources[source])]
            others = [rank for rank in unit.takers[source] if rank != self.me]
            unit.sent[source] = [(rank, self._comm.Isend(data, dest=rank)) for rank in others]

    def finish(self, unit: _Unit) -> None:
        """Wait for what arrives, write the sums, and give the buffers back."""
        self._wait(unit.arrivals.values())
        for part, row in zip(unit.of.targets, unit.of.factors, strict=True):
            if part.rank == self.me and unit.length(part):
                self._sum(unit, part, row)
        for source, buffer in unit.inputs.items():
            self._busy.append((buffer, unit.sent.get(source, []), None))

    def drain(self) -> None:
        """Wait for all that is still under way."""
        while self._busy:
            self._release()

    def _sum(self, unit: _Unit, part: Part, row: tuple[int, ...]) -> None:
        length = unit.length(part)
        terms = [(factor, s) for s, factor in enumerate(row) if factor and s in unit.inputs]
        inputs = [unit.inputs[s][: min(unit.length(unit.of.sources[s]), length)] for _, s in terms]
        out = self._take()
        self._port.combine(out[:length], [factor for factor, _ in terms], inputs)
        self._busy.append((out, [], self._port.write(part, unit.lo, out, length)))

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _take(self) -> np.ndarray:
        if not self._free and self._unmade:
            self._unmade -= 1
            return np.frombuffer(mmap.mmap(-1, self._chunk), np.uint8)  # begins on a page, as direct I/O wants it
        while not self._free:
            self._release()
        return self._free.pop()

    def _release(self) -> None:
        """Wait until the buffer that is busy for longest is free."""
        buffer, messages, write = self._busy.popleft()
        self._wait(messages)
        if write is not None:
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


def _silence(rank: int, seconds: float) -> RankSilent:
    return RankSilent(
        f"rank {rank} neither sends nor takes its part of the redundancy",
        rank=rank,
        found=f"silence for {seconds:g} s",
        expected="the next bytes",
        action="See whether that rank still runs and its disk answers; raise `timeout` if it is only slow.",
    )
