"""What is to be done with what the nodes still hold: read here, sent there, made again, or lost. Pure.

A rank looks after the files of the rank of its own number in the save, and of those that follow at a distance of the
launch's size, where it has fewer ranks than the save: *host* of rank r is r mod size. After recovery each host's node
holds the data, the parity and the descriptor of each rank it looks after, whatever lay where before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mpi_ckpt.comm.exchange import Combination, Part
from mpi_ckpt.errors import MissingShard
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.descriptor import Descriptor, ParityPiece, parity_name
from mpi_ckpt.redundancy.groups import surviving_losses
from mpi_ckpt.redundancy.planner import DATA, PARITY, MemberFile
from mpi_ckpt.redundancy.survey import Found

_ACTION = "Restore an older step, or this one from the shared or the remote tier."


class LostBeyondScheme(MissingShard):
    """More members of a parity group are lost than its scheme can give back."""


class FileKey(NamedTuple):
    """A file of a save: the group's index, the member's place in it, data or parity."""

    group: int
    member: int
    kind: str


class Place(NamedTuple):
    """A node's directory, as the ranks on it see it."""

    domain: str
    directory: str


class Vote(NamedTuple):
    """What a rank reports: where it is, and what lies there. One rank a place tells all, the others what is damaged."""

    place: Place
    found: Found


def speakers(places: Sequence[Place]) -> frozenset[int]:
    """The ranks that tell all: the lowest of each place."""
    return frozenset({place: rank for rank, place in reversed(list(enumerate(places)))}.values())


@dataclass(frozen=True)
class Report:
    """What was done, by file name. `weak`: groups (their ranks) that survive fewer losses than the scheme promises.

    That happens when members of a group now run in one failure domain; `protect` forms new groups.
    """

    moved: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    weak: tuple[tuple[int, ...], ...] = ()


@dataclass
class Recovery:
    """The plan, the same for all ranks. `groups`: each with the present domains and without parity.

    `names` is what a file is called, in whichever directory; `targets` the rank that writes it; `parity` what is known
    of parity files that exist.
    """

    groups: list[Descriptor]
    combinations: list[Combination] = field(default_factory=list)
    names: dict[FileKey, str] = field(default_factory=dict)
    targets: dict[FileKey, int] = field(default_factory=dict)
    parity: dict[FileKey, tuple[ParityPiece, ...]] = field(default_factory=dict)
    report: Report = Report()

    def nbytes(self, key: FileKey) -> int:
        """The size of a file."""
        group = self.groups[key.group]
        if key.kind == DATA:
            return group.members[key.member].nbytes
        return max(part.offset + part.nbytes for part in _parts(group, key.member, PARITY))


def plan_recovery(votes: Sequence[Vote], save_id: str) -> Recovery:
    """From every rank's vote, in rank order. Raises LostBeyondScheme, naming group and members."""
    size = len(votes)
    known = _groups(votes, save_id)
    plan = Recovery([_in_present_domains(group, votes) for group in known])
    moved: list[str] = []
    rebuilt: list[str] = []
    encoded: list[str] = []
    for index, group in enumerate(known):
        readers = _readers(plan, index, group, votes)
        found = planner.rebuild(group.scheme, group.sizes, readers.keys())
        if found.lost:
            raise _lost(group, found.lost, readers)
        plan.combinations += [_placed(index, c, readers, group.ranks, size) for c in found.combinations]
        for file in _files(group):
            key, host = FileKey(index, *file), group.ranks[file.member] % size
            data = group.members[file.member].file
            plan.names[key] = data if file.kind == DATA else parity_name(data)
            if readers.get(file) == host:
                continue
            plan.targets[key] = host
            if file in readers:
                plan.combinations += _move(key, _parts(group, *file), readers[file], host)
            (moved if file in readers else rebuilt if file.kind == DATA else encoded).append(plan.names[key])
    weak = [g.ranks for g in plan.groups if surviving_losses(g.scheme, _domains(g)) < g.scheme.tolerance]
    plan.report = Report(tuple(moved), tuple(rebuilt), tuple(encoded), tuple(weak))
    return plan


def _groups(votes: Sequence[Vote], save_id: str) -> list[Descriptor]:
    """One descriptor of each group. Raises LostBeyondScheme where a rank of the save is in none that is known."""
    seen: dict[tuple[str, tuple[int, ...]], list[Descriptor]] = {}
    for vote in votes:
        for found in vote.found.descriptors:
            seen.setdefault(found.group, []).append(found)
    chosen: list[Descriptor] = []
    covered: set[int] = set()
    # A launch that died while it formed new groups left descriptors of both: those of which more are left win.
    for (_, ranks), alike in sorted(seen.items(), key=lambda item: (-len(item[1]), item[0])):
        if covered.isdisjoint(ranks):
            chosen.append(alike[0])
            covered |= {*ranks}
    if not chosen:
        raise LostBeyondScheme(
            "no node holds anything of this save",
            found=f"no redundancy descriptor of save {save_id}",
            expected="that of at least one member of each parity group",
            action=_ACTION,
        )
    missing = sorted({*range(chosen[0].world_size)} - covered)
    if missing:
        raise LostBeyondScheme(
            f"more is lost than {chosen[0].scheme} gives back: all members of the parity groups of ranks "
            + _list(missing),
            rank=missing[0],
            found=f"the redundancy descriptors of the groups of ranks {_list(sorted(covered))}",
            expected="that of at least one member of each parity group",
            action=_ACTION,
        )
    return sorted(chosen, key=lambda group: min(group.ranks))


def _in_present_domains(group: Descriptor, votes: Sequence[Vote]) -> Descriptor:
    members = tuple(member._replace(domain=votes[member.rank % len(votes)].place.domain) for member in group.members)
    return replace(group, members=members, parity=())


def _domains(group: Descriptor) -> list[str]:
    return [member.domain for member in group.members]


def _files(group: Descriptor) -> Iterator[MemberFile]:
    for member in range(len(group.members)):
        yield MemberFile(member, DATA)
        if _parts(group, member, PARITY):
            yield MemberFile(member, PARITY)


def _parts(group: Descriptor, member: int, kind: str) -> list[Part]:
    if kind == DATA:
        return [Part(member, MemberFile(member, DATA), 0, group.members[member].nbytes)]
    return planner.parity_parts(group.scheme, group.sizes, member)


def _readers(plan: Recovery, index: int, group: Descriptor, votes: Sequence[Vote]) -> dict[MemberFile, int]:
    """Who reads which of a group's files that are there: the host, if they lie on its node; else one who sees them."""
    ranks: dict[Place, list[int]] = {}
    for rank, vote in enumerate(votes):
        ranks.setdefault(vote.place, []).append(rank)
    damaged = {(vote.place, name) for vote in votes for name in vote.found.damaged}
    readers: dict[MemberFile, int] = {}

    def look(vote: Vote, file: MemberFile, name: str, nbytes: int) -> None:
        if vote.found.files.get(name) != nbytes or (vote.place, name) in damaged:
            return
        host, there = group.ranks[file.member] % len(votes), ranks[vote.place]
        if host in there or file not in readers:
            readers[file] = host if host in there else there[file.member % len(there)]

    for vote in votes:
        for place, member in enumerate(group.members):
            look(vote, MemberFile(place, DATA), member.file, member.nbytes)
        for found in vote.found.descriptors:
            if found.group == group.group and found.parity:
                look(vote, MemberFile(found.member, PARITY), parity_name(found.mine.file), found.parity_nbytes)
                plan.parity[FileKey(index, found.member, PARITY)] = found.parity
    return readers


def _placed(
    index: int, combination: Combination, readers: dict[MemberFile, int], ranks: Sequence[int], size: int
) -> Combination:
    """Members become ranks of this launch: those that read, and the hosts that write."""

    def place(part: Part, rank: int) -> Part:
        return replace(part, rank=rank, file=FileKey(index, *part.file))

    return Combination(
        # A part without bytes may be of a file that nobody has.
        tuple(place(part, readers.get(part.file, 0)) for part in combination.sources),
        tuple(place(part, ranks[part.rank] % size) for part in combination.targets),
        combination.factors,
    )


def _move(key: FileKey, parts: Sequence[Part], reader: int, host: int) -> list[Combination]:
    here, there = ([replace(part, rank=rank, file=key) for part in parts] for rank in (reader, host))
    return [Combination((a,), (b,), ((1,),)) for a, b in zip(here, there, strict=True)]


def _lost(group: Descriptor, lost: Sequence[int], readers: dict[MemberFile, int]) -> LostBeyondScheme:
    gone = [group.members[place] for place in lost]
    files = sum(file not in readers for file in _files(group))
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
