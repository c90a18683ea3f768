"""Which parity groups a recovery goes by: where ranks were protected anew, those of both protections may be left. Pure.

A launch that died while it formed new groups left each rank's redundancy old or new, and one that failed at it left
none. Groups that a recovery uses have no rank in common, for a rank has one parity file. A rank that is in none of them
is *bare*: its data have to lie somewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mpi_ckpt.errors import MissingShard
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.descriptor import Descriptor, Member, ParityPiece
from mpi_ckpt.redundancy.planner import DATA, PARITY, MemberFile
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage.records import ShardRecord

_ACTION = "Restore an older step, or this one from the shared or the remote tier."


class LostBeyondScheme(MissingShard):
    """More members of a parity group are lost than its scheme can give back.

    `needed`: ranks whose files, if they came from elsewhere, would give back others, or all that is lost.
    """

    needed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A group, who reads which of its files that are there, and what is known of its parity files, by member."""

    group: Descriptor
    readers: dict[MemberFile, int]
    parity: dict[int, tuple[ParityPiece, ...]]
    way: planner.Rebuild

    @classmethod
    def of(
        cls, group: Descriptor, readers: dict[MemberFile, int], parity: dict[int, tuple[ParityPiece, ...]]
    ) -> Candidate:
        """With the way in which the files that are not there come back."""
        return cls(group, readers, parity, planner.rebuild(group.scheme, group.sizes, readers.keys()))


def alone(record: ShardRecord, reader: int | None, save_id: str, world_size: int) -> Candidate:
    """A bare rank as a group of its own, without redundancy."""
    member = Member(record.rank, "", record.path, record.nbytes, record.sha256)
    group = Descriptor(save_id, world_size, Scheme.parse("single"), 0, (member,), ())
    return Candidate.of(group, {} if reader is None else {MemberFile(0, DATA): reader}, {})


def choose(candidates: Sequence[Candidate], needy: Collection[int]) -> list[Candidate]:
    """Groups without a common rank, each of which gives back all of its files; of equal ones the first in order.

    The ranks that are `needy`, whose data lie nowhere, choose before the others, and who has the fewest groups to
    choose from before who has more: what is left of an old and of a new protection makes a whole one then, if it can.
    """
    options = [candidate for candidate in candidates if not candidate.way.lost]
    chosen: list[Candidate] = []
    while options:
        count = Counter(rank for option in options for rank in option.group.ranks)
        if max(count.values()) == 1:  # as it nearly always is: none excludes another
            return chosen + options
        first = min(count, key=lambda rank: (rank not in needy, count[rank], rank))
        best = next(option for option in options if first in option.group.ranks)
        chosen.append(best)
        options = [option for option in options if {*best.group.ranks}.isdisjoint(option.group.ranks)]
    return chosen


def files_of(group: Descriptor) -> Iterator[MemberFile]:
    """Those that a group has when nothing is lost."""
    for member in range(len(group.members)):
        yield MemberFile(member, DATA)
        if planner.parity_parts(group.scheme, group.sizes, member):
            yield MemberFile(member, PARITY)


def beyond(lost: Sequence[int], candidates: Sequence[Candidate], records: Sequence[ShardRecord]) -> LostBeyondScheme:
    """The error for ranks whose data lie nowhere, and that no group gives back; of one group, where any is known."""
    error = _beyond(lost, candidates, records)
    error.needed = _needed(lost, candidates)
    return error


def _needed(lost: Sequence[int], candidates: Sequence[Candidate]) -> tuple[int, ...]:
    """Those that no group gives back by itself, if there are such: of three partners two are lost, and of the one there
    is still the copy."""
    copies = {candidate.group.ranks[m] for candidate in candidates for m in _given_back(candidate)}
    return tuple(rank for rank in lost if rank not in copies) or tuple(lost)


def _given_back(candidate: Candidate) -> Iterator[int]:
    for member in range(len(candidate.group.members)):
        if MemberFile(member, DATA) not in candidate.readers and member not in candidate.way.lost:
            yield member


def _beyond(lost: Sequence[int], candidates: Sequence[Candidate], records: Sequence[ShardRecord]) -> LostBeyondScheme:
    rank = lost[0]
    known = next((candidate for candidate in candidates if rank in candidate.group.ranks), None)
    if known is not None:
        return _lost_of_group(known, lost)
    if candidates:
        what = f"more is lost than {candidates[0].group.scheme} gives back: all members of the parity groups of ranks "
    elif len(lost) == len(records):
        what = "no node holds anything of this save: not the files of ranks "
    else:
        what = "more is lost than can be given back: all that tells of redundancy, and the files of ranks "
    return LostBeyondScheme(
        what + _list(lost),
        path=records[rank].path,
        rank=rank,
        found=f"{len(lost)} of {len(records)} shards on no node, and no redundancy descriptor that tells of them",
        expected="each shard, or the descriptor of at least one member of its parity group",
        action=_ACTION,
    )


def _lost_of_group(known: Candidate, lost: Sequence[int]) -> LostBeyondScheme:
    group = known.group
    gone = [member for member in group.members if member.rank in lost]
    files = sum(file not in known.readers for file in files_of(group))
    return LostBeyondScheme(
        f"more is lost than {group.scheme} gives back: in the parity group of ranks {_list(group.ranks)} the files of "
        + ", ".join(f"rank {member.rank} (domain {member.domain})" for member in gone),
        path=gone[0].file,
        rank=gone[0].rank,
        found=f"{files} files of the group missing or damaged, data and parity",
        expected=f"the loss of at most {group.scheme.tolerance} of its {len(group.ranks)} members",
        action=_ACTION,
    )


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
