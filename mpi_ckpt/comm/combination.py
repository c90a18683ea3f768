"""What is to be exchanged: sums of file parts that lie on different ranks, and who has to do what for a chunk of one.

A *combination* says: each target part is a sum of source parts, with a factor each. A copy is a combination of one
source and one target; the parity of a stripe has its data as sources; a lost piece is the target of pieces that
survived. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


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
class Chunk:
    """The bytes lo..lo+size-1 of each part of a combination, of what it has there."""

    of: Combination
    lo: int
    size: int

    def length(self, part: Part) -> int:
        """Bytes of the part that lie in this chunk."""
        return min(max(part.nbytes - self.lo, 0), self.size)

    @functools.cached_property
    def takers(self) -> list[list[int]]:
        """For each source the ranks that need it, ascending: those whose target does not end before this chunk."""
        rows = [(t.rank, row) for t, row in zip(self.of.targets, self.of.factors, strict=True) if self.length(t)]
        return [
            sorted({rank for rank, row in rows if row[source]}) if self.length(part) else []
            for source, part in enumerate(self.of.sources)
        ]

    def sources_at(self, rank: int) -> list[tuple[int, Part]]:
        """What the rank reads, by the number of the source."""
        return [(s, part) for s, part in enumerate(self.of.sources) if part.rank == rank and self.takers[s]]

    def arrivals_at(self, rank: int) -> list[tuple[int, Part]]:
        """What the rank is sent, by the number of the source."""
        return [(s, part) for s, part in enumerate(self.of.sources) if part.rank != rank and rank in self.takers[s]]

    def targets_at(self, rank: int) -> list[tuple[Part, tuple[int, ...]]]:
        """What the rank writes, with the factors of its sum."""
        rows = zip(self.of.targets, self.of.factors, strict=True)
        return [(part, row) for part, row in rows if part.rank == rank and self.length(part)]

    def passes_on(self, rank: int) -> bool:
        """Whether what the rank writes is just what arrives there: one part, as it is."""
        arrivals, targets = self.arrivals_at(rank), self.targets_at(rank)
        if len(arrivals) != 1 or len(targets) != 1:
            return False
        (source, part), (target, row) = arrivals[0], targets[0]
        return self.length(part) == self.length(target) and row == tuple(int(s == source) for s in range(len(row)))


def chunks(combinations: Sequence[Combination], size: int, rank: int) -> Iterator[Chunk]:
    """A chunk of every combination that `rank` has a part in, then the next of every one: so all ranks stay busy."""
    mine = [c for c in combinations if any(part.rank == rank for part in (*c.sources, *c.targets))]
    for lo in range(0, max((c.nbytes for c in mine), default=0), size):
        yield from (Chunk(c, lo, size) for c in mine if lo < c.nbytes)
