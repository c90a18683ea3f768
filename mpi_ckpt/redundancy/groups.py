"""Who protects whom: ranks dealt into parity groups so that the loss of a failure domain costs a group one member.

Ranks are sorted by domain, the fullest first, and dealt like cards to g groups: rank i of that order goes to group
i mod g. The ranks of a domain follow each other, so that no group gets two of them as long as no domain has more than
g; and the groups' sizes differ by one at most. Pure and deterministic: every rank could compute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.redundancy.scheme import Scheme


@dataclass(frozen=True)
class Grouping:
    """`groups`: the ranks of each, in ring order. `tolerance`: how many domains may be lost at once, any of them.

    It is below the scheme's tolerance where members of a group had to share a domain.
    """

    groups: tuple[tuple[int, ...], ...]
    tolerance: int

    def group_of(self, rank: int) -> int:
        """The index of the one group that `rank` is in."""
        return next(index for index, group in enumerate(self.groups) if rank in group)


def form_groups(scheme: Scheme, domains: Sequence[str]) -> Grouping:
    """The parity groups of the ranks 0 to n-1 that run in `domains[rank]`.

    Groups have the scheme's size, or more where the numbers do not divide, so that they cost no more than it says; only
    where one domain has so many ranks that larger groups would hold two of them are they smaller. A group always has
    more members than parities. Where even then members would have to share a domain, schemes with several parities
    settle for a smaller tolerance (`Grouping.tolerance`). Raises CheckpointError where not even the loss of one domain
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


def surviving_losses(scheme: Scheme, domains: Sequence[str]) -> int:
    """How many failure domains, any of them, the *one* group whose members run in `domains` may lose."""
    lost = 0
    for count, (_, members) in enumerate(Counter(domains).most_common()):
        lost += members
        if lost > scheme.parities:
            return count
    return len(domains)  # unreachable for a group that has more members than parities


def _unprotected(scheme: Scheme, counts: Counter[str], what: str) -> CheckpointError:
    domain, most = counts.most_common(1)[0]
    return CheckpointError(
        f"{scheme} cannot protect these ranks: {what}",
        found=f"{most} of {counts.total()} ranks in {domain!r}, {len(counts)} domain{'s' * (len(counts) != 1)}",
        expected=f"groups of more than {scheme.parities} ranks that lie in different domains",
        action="Spread the ranks evenly over more nodes, name the failure domains (MPI_CKPT_DOMAIN), or save with "
        "another scheme ('single' protects from nothing).",
    )
