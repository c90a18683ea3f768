"""What is to be done with what the nodes still hold: read here, sent there, made again, or lost. Pure.

A rank looks after the files of the rank of its own number in the save, and of those that follow at a distance of the
launch's size, where it has fewer ranks than the save: *host* of rank r is r mod size. After recovery each host's node
holds the data, the parity and the descriptor of each rank it looks after, whatever lay where before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mpi_ckpt.comm.combination import Combination, Part
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.coverage import Candidate, alone, beyond, choose, files_of
from mpi_ckpt.redundancy.descriptor import Descriptor, Member, ParityPiece, parity_name
from mpi_ckpt.redundancy.groups import form_groups
from mpi_ckpt.redundancy.planner import DATA, PARITY, MemberFile
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.redundancy.survey import Found
from mpi_ckpt.storage.records import ShardRecord


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

    That happens when members of a group now run in one failure domain; or to `bare` ranks, whose redundancy is lost
    with all that tells of it. `protect_anew` forms new groups.
    """

    moved: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    encoded: tuple[str, ...] = ()
    weak: tuple[tuple[int, ...], ...] = ()
    bare: tuple[int, ...] = ()


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

    @property
    def is_unchecked(self) -> bool:
        """Whether parity is made that nothing tells of any more: it is right only if all that it is made from is."""
        return any(key.kind == PARITY and key not in self.parity for key in self.targets)

    def nbytes(self, key: FileKey) -> int:
        """The size of a file."""
        group = self.groups[key.group]
        if key.kind == DATA:
            return group.members[key.member].nbytes
        return max(part.offset + part.nbytes for part in _parts(group, key.member, PARITY))


def plan_recovery(votes: Sequence[Vote], save_id: str, records: Sequence[ShardRecord]) -> Recovery:
    """From every rank's vote, in rank order, and the save's shards by rank. Raises LostBeyondScheme, naming members.

    Data that lie somewhere need no descriptor. Ranks that no group protects any more are groups of their own in the
    plan, the last ones, and `bare` in its report.
    """
    lying = _Lying(votes)
    candidates = _candidates(votes, lying)
    readers = {r.rank: lying.reader(r.path, r.nbytes, r.rank) for r in records}
    needy = {r.rank for r in records if r.nbytes and readers[r.rank] is None}
    chosen = sorted(choose(candidates, needy), key=lambda candidate: min(candidate.group.ranks))
    bare = sorted(readers.keys() - {rank for candidate in chosen for rank in candidate.group.ranks})
    if lost := [rank for rank in bare if rank in needy]:
        raise beyond(lost, candidates, records)
    chosen += [alone(records[rank], readers[rank], save_id, len(records)) for rank in bare]
    return _plan(chosen, tuple(bare), votes)


def plan_new_groups(places: Sequence[Place], scheme: Scheme, save_id: str, records: Sequence[ShardRecord]) -> Recovery:
    """All parity of a save again, by groups of the nodes that its files lie on now, each with its host's.

    `places` are those of the launch's ranks. Raises Unprotected.
    """
    size = len(places)
    members = [Member(r.rank, "", r.path, r.nbytes, r.sha256) for r in records]
    chosen = []
    for ranks in form_groups(scheme, host_domains(places, len(records))).groups:
        group = Descriptor(save_id, len(records), scheme, 0, tuple(members[rank] for rank in ranks), ())
        readers = {MemberFile(member, DATA): rank % size for member, rank in enumerate(ranks)}
        chosen.append(Candidate.of(group, readers, {}))
    return _plan(chosen, (), [Vote(place, Found()) for place in places])


def host_domains(places: Sequence[Place], world_size: int) -> list[str]:
    """The failure domain that the files of each rank of the save lie in."""
    return [places[rank % len(places)].domain for rank in range(world_size)]


def _plan(chosen: Sequence[Candidate], bare: tuple[int, ...], votes: Sequence[Vote]) -> Recovery:
    size = len(votes)
    plan = Recovery([_in_present_domains(candidate.group, votes) for candidate in chosen])
    moved: list[str] = []
    rebuilt: list[str] = []
    encoded: list[str] = []
    for index, (group, readers, parity, way) in enumerate((c.group, c.readers, c.parity, c.way) for c in chosen):
        plan.combinations += [_placed(index, c, readers, group.ranks, size) for c in way.combinations]
        plan.parity |= {FileKey(index, member, PARITY): pieces for member, pieces in parity.items()}
        for file in files_of(group):
            key, host = FileKey(index, *file), group.ranks[file.member] % size
            data = group.members[file.member].file
            plan.names[key] = data if file.kind == DATA else parity_name(data)
            if readers.get(file) == host:
                continue
            plan.targets[key] = host
            if file in readers:
                plan.combinations += _move(key, _parts(group, *file), readers[file], host)
            (moved if file in readers else rebuilt if file.kind == DATA else encoded).append(plan.names[key])
    weak = [g.ranks for g in plan.groups if g.tolerance < g.scheme.tolerance or g.ranks[0] in bare]
    plan.report = Report(tuple(moved), tuple(rebuilt), tuple(encoded), tuple(weak), bare)
    return plan


class _Lying:
    """Who reads a file that lies somewhere, of the right size and not known to be damaged."""

    def __init__(self, votes: Sequence[Vote]) -> None:
        self._ranks: dict[Place, list[int]] = {}
        for rank, vote in enumerate(votes):
            self._ranks.setdefault(vote.place, []).append(rank)
        damaged = {(vote.place, name) for vote in votes for name in vote.found.damaged}
        self._places: dict[tuple[str, int], list[Place]] = {}
        for place, found in votes:
            for file in found.files.items():
                if (place, file[0]) not in damaged:
                    self._places.setdefault(file, []).append(place)
        self._size = len(votes)

    def reader(self, name: str, nbytes: int, rank: int, only: Place | None = None) -> int | None:
        """The host of `rank`, if the file lies on its node; else one who sees it; None if nobody does.

        Files at `only`, if it is given, are looked at alone.
        """
        places = [place for place in self._places.get((name, nbytes), ()) if only in (None, place)]
        if any(rank % self._size in self._ranks[place] for place in places):
            return rank % self._size
        there = self._ranks[places[0]] if places else []
        return there[rank % len(there)] if there else None


def _candidates(votes: Sequence[Vote], lying: _Lying) -> list[Candidate]:
    """All groups of the save, those first of which more descriptors are left."""
    seen: dict[tuple[str, tuple[int, ...]], list[tuple[Place, Descriptor]]] = {}
    for vote in votes:
        for found in vote.found.descriptors:
            seen.setdefault(found.group, []).append((vote.place, found))
    ordered = sorted(seen.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_candidate(alike, lying, len(votes)) for _, alike in ordered]


def _candidate(alike: Sequence[tuple[Place, Descriptor]], lying: _Lying, size: int) -> Candidate:
    """From the descriptors of one group. A parity file is one only where its descriptor lies beside it."""
    group, readers, parity = alike[0][1], {}, {}
    for place, member in enumerate(group.members):
        reader = lying.reader(member.file, member.nbytes, member.rank)
        if reader is not None:
            readers[MemberFile(place, DATA)] = reader
    for here, found in alike:
        file, rank = MemberFile(found.member, PARITY), found.mine.rank
        reader = lying.reader(parity_name(found.mine.file), found.parity_nbytes, rank, here) if found.parity else None
        if reader is not None and (file not in readers or reader == rank % size):
            readers[file] = reader
        if found.parity:
            parity[found.member] = found.parity
    return Candidate.of(group, readers, parity)


def _in_present_domains(group: Descriptor, votes: Sequence[Vote]) -> Descriptor:
    members = tuple(member._replace(domain=votes[member.rank % len(votes)].place.domain) for member in group.members)
    return replace(group, members=members, parity=())


def _parts(group: Descriptor, member: int, kind: str) -> list[Part]:
    if kind == DATA:
        return [Part(member, MemberFile(member, DATA), 0, group.members[member].nbytes)]
    return planner.parity_parts(group.scheme, group.sizes, member)


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
