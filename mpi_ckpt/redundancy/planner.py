"""Who holds which piece of a parity group's files, and which pieces give back those that were lost: pure.

The files of a group's n members are cut into stripes. A stripe has k data pieces and m parity pieces, no two of them
with one member, so that it survives the loss of any m members:

  partner     stripe j: member j's whole file, and its copy with member j + 1                           k = m = 1
  xor, rs     every file is k = n - m segments. In stripe j the members j..j+m-1 (mod n) hold the parities 0..m-1, and
              the others, in ring order, a segment each: the one of their place in that order. So every member has k
              segments of data in k stripes and m parities, 1/k of its file each, in the other m.

This is the rotation of RAID-5 that SCR's XOR sets have (W. Gropp, R. Ross, N. Miller, "Providing Efficient I/O
Redundancy in MPI Environments", EuroPVM/MPI 2004), for any m. Files of different length are followed by zeros, which
are never stored nor sent; segments are whole pages, so that direct I/O reaches them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpi_ckpt.comm.combination import Combination, Part
from mpi_ckpt.redundancy import galois
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage.direct import align_up

DATA, PARITY = "data", "parity"


class MemberFile(NamedTuple):
    """A file of a group: the data or the parity (partner: the copy) that a member holds."""

    member: int
    kind: str


@dataclass(frozen=True)
class Stripe:
    """The pieces that belong together, k of data and m of parity; a part's `rank` is the member that holds it."""

    data: tuple[Part, ...]
    parity: tuple[Part, ...]


@dataclass(frozen=True)
class Rebuild:
    """How to get back what is missing; `lost`: members whose data the scheme cannot give back, whatever is done."""

    combinations: tuple[Combination, ...]
    lost: tuple[int, ...]


def stripes(scheme: Scheme, nbytes: Sequence[int]) -> list[Stripe]:
    """The stripes of a group whose member j has a file of nbytes[j]; none for `single`.

    Raises ValueError for a group that has no more members than parities.
    """
    n, m = len(nbytes), scheme.parities
    if n <= m:
        raise ValueError(f"found a group of {n} members, expected more than {m} for {scheme}")
    return [_stripe(scheme, nbytes, j) for j in range(n)] if m else []


def segment_bytes(scheme: Scheme, nbytes: Sequence[int]) -> int:
    """Bytes of a full segment of xor and rs: the k-th part of the longest file, in whole pages."""
    return align_up(-(-max(nbytes) // (len(nbytes) - scheme.parities)))


def _stripe(scheme: Scheme, nbytes: Sequence[int], first: int) -> Stripe:
    n, m = len(nbytes), scheme.parities
    if scheme.kind == "partner":
        size = nbytes[first]
        return Stripe((_part(first, DATA, 0, size),), (_part((first + 1) % n, PARITY, 0, size),))
    segment = segment_bytes(scheme, nbytes)
    data = []
    for place in range(n - m):
        member = (first + m + place) % n
        offset = place * segment
        data.append(_part(member, DATA, offset, min(max(nbytes[member] - offset, 0), segment)))
    longest = max(part.nbytes for part in data)
    return Stripe(tuple(data), tuple(_part((first + p) % n, PARITY, p * segment, longest) for p in range(m)))


def _part(member: int, kind: str, offset: int, nbytes: int) -> Part:
    return Part(member, MemberFile(member, kind), offset, nbytes)


def parity_parts(scheme: Scheme, nbytes: Sequence[int], member: int) -> list[Part]:
    """The pieces that make a member's parity file, by ascending offset."""
    n = len(nbytes)
    before = [1] if scheme.kind == "partner" else range(scheme.parities)
    found = [part for p in before for part in _stripe(scheme, nbytes, (member - p) % n).parity]
    return [part for part in found if part.rank == member and part.nbytes]


def encode(scheme: Scheme, nbytes: Sequence[int]) -> tuple[Combination, ...]:
    """All parity of a group from all its data."""
    found = []
    for stripe in stripes(scheme, nbytes):
        rows = galois.generator(len(stripe.data), len(stripe.parity))[len(stripe.data) :]
        found.append(Combination(stripe.data, stripe.parity, _factors(rows)))
    return tuple(found)


def rebuild(scheme: Scheme, nbytes: Sequence[int], held: Collection[MemberFile]) -> Rebuild:
    """What gives back every file of a group that is not among those `held`, data and parity alike."""
    combinations, lost = [], set()
    if scheme.kind == "single":
        lost = {j for j, size in enumerate(nbytes) if size and MemberFile(j, DATA) not in held}
    for stripe in stripes(scheme, nbytes):
        k, pieces = len(stripe.data), (*stripe.data, *stripe.parity)
        missing = [i for i, part in enumerate(pieces) if part.nbytes and part.file not in held]
        # Zeros beyond a file's end are known, whoever is lost. They come first: nobody has to send them.
        known = sorted((i for i in range(len(pieces)) if i not in missing), key=lambda i: pieces[i].nbytes > 0)[:k]
        if missing and len(known) < k:
            lost |= {pieces[i].rank for i in missing if i < k}
        elif missing:
            rows = galois.recovery(k, len(stripe.parity), known, missing)
            sources, targets = (tuple(pieces[i] for i in chosen) for chosen in (known, missing))
            combinations.append(Combination(sources, targets, _factors(rows)))
    return Rebuild(tuple(combinations), tuple(sorted(lost)))


def _factors(rows: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in rows)
