"""Who protects whom: ranks dealt into parity groups so that the loss of a failure domain costs a group one member.

Ranks are sorted by domain, the fullest first, and dealt like cards to g groups: rank i of that order goes to group
i mod g. The ranks of a domain follow each other, so that no group gets two of them as long as no domain has more than
g; and the groups' sizes differ by one at most. Pure and deterministic: every rank could compute it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.redundancy.scheme import Scheme


class Unprotected(CheckpointError):
    """The failure domains cannot protect each other: not even the loss of one would be survived."""


@dataclass(frozen=True)
class Grouping:
    """`groups`: the ranks of each, in ring order. `tolerance`: how many domains may be lost at once, any of them.

    It is below the scheme's tolerance where members of a group had to share a domain.
    """

    groups: tuple[tuple[int, ...], ...]
    tolerance: int


def form_groups(scheme: Scheme, domains: Sequence[str]) -> Grouping:
    """The parity groups of the ranks 0 to n-1 that run in `domains[rank]`.

    Groups have the scheme's size, or more where the numbers do not divide, so that they cost no more than it says; only
    where one domain has so many ranks that larger groups would hold two of them are they smaller. A group always has
    more members than parities. Where even then members would have to share a domain, schemes with several parities
    settle for a smaller tolerance (`Grouping.tolerance`). Raises Unprotected where not even the loss of one domain
    would be survived.
    """
    if scheme.kind == "single":
        return Grouping(tuple((rank,) for rank in range(len(domains))), 0)
    counts = Counter(domains)
    if len(counts) < 2:
        raise _unprotected(scheme, counts, "all ranks run in one failure domain: its loss would take data and parity")
    order = sorted(range(len(domains)), key=lambda rank: (-counts[domains[rank]], domains[rank], rank))
    fullest = max(counts.values())
    for sharing in range(1, scheme.parities + 1):  # members of one group that one domain may have
        n_groups = max(-(-fullest // sharing), len(domains) // scheme.size, 1)
        if len(domains) // n_groups > scheme.parities:
            groups = tuple(tuple(order[first::n_groups]) for first in range(n_groups))
            return Grouping(groups, scheme.parities // sharing)
    raise _unprotected(scheme, counts, "one failure domain has too many of the ranks to be protected by the others")


def shortfall(scheme: Scheme, grouping: Grouping) -> str | None:
    """What the groups give less than the scheme promises, or cost more; None where all is as promised.

    (xor promises no size of its groups: those of fewer nodes than XOR_SIZE cost what they must.)
    """
    members = min(map(len, grouping.groups))
    weaker, dearer = grouping.tolerance < scheme.tolerance, scheme.kind == "rs" and members < scheme.size
    if not (weaker or dearer):
        return None
    survived, cost = str(grouping.tolerance), f"{_extra(scheme, members):.0f} %"
    return (
        f"groups of {members} ranks are the most that these failure domains allow: {survived} of these may be lost at "
        f"once{f', not {scheme.tolerance}' * weaker}, and redundancy takes {cost} of the bytes of the data"
        f"{f', not {_extra(scheme, scheme.size):.0f} %' * dearer}"
    )


def _extra(scheme: Scheme, members: int) -> float:
    """Bytes beside the data, in per cent of them."""
    return 100 * (scheme.stored_bytes(1 << 20, members) / (1 << 20) - 1)


def surviving_losses(scheme: Scheme, domains: Sequence[str]) -> int:
    """How many failure domains, any of them, the *one* group whose members run in `domains` may lose."""
    largest_first = (members for _, members in Counter(domains).most_common())
    return sum(lost <= scheme.parities for lost in itertools.accumulate(largest_first))


def _unprotected(scheme: Scheme, counts: Counter[str], what: str) -> Unprotected:
    domain, most = counts.most_common(1)[0]
    return Unprotected(
        f"{scheme} cannot protect these ranks: {what}",
        found=f"{most} of {counts.total()} ranks in {domain!r}, {len(counts)} domain{'s' * (len(counts) != 1)}",
        expected=f"groups of more than {scheme.parities} ranks that lie in different domains",
        action="Spread the ranks evenly over more nodes, name the failure domains (MPI_CKPT_DOMAIN), or save with "
        "another scheme ('single' protects from nothing).",
    )
