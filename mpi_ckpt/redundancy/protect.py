"""Give every rank's file of a save its redundancy, before the save becomes visible."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.combination import Combination
from mpi_ckpt.comm.exchange import exchange
from mpi_ckpt.errors import CheckpointError, SaveFailed
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.descriptor import (
    Descriptor,
    Member,
    ParityPiece,
    descriptor_name,
    parity_name,
    write_descriptor,
)
from mpi_ckpt.redundancy.files import Files, InMemory
from mpi_ckpt.redundancy.groups import form_groups
from mpi_ckpt.redundancy.planner import DATA, PARITY, MemberFile
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.direct import SLOW_DISK

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A rank's file that is to be protected: its final plain name, its size, and its bytes in memory."""

    name: str
    nbytes: int
    origin: InMemory


class Protection:
    """The redundancy of one save: agreed on before anybody writes, and then written, for this rank, on its node.

    In two steps, for as long as threads write on all cores, ranks that wait for each other wait long.
    """

    def __init__(
        self, council: Council, scheme: Scheme, domain: str, source: Source, directory: Path, *, save_id: str
    ) -> None:
        """**Collective.** Agree on the groups.

        Each rank gives its own file and failure domain, and the directory of its node; scheme and save_id are the same
        on all. Raises CheckpointError where the domains cannot protect each other, SaveFailed.
        """
        self._council, self._source, self._directory = council, source, Path(directory)
        mine = Member(council.rank, domain, source.name, source.nbytes, "")
        self._own = replace(_agree_on_groups(council, scheme, mine), save_id=save_id)

    def write(self, sha256: Callable[[], str]) -> Descriptor:
        """**Collective.** Write this rank's parity file and its descriptor.

        `sha256()` gives that of this rank's own file. It is asked last, and may wait for the file to be written; what
        it raises fails the save. When this returns, parity and descriptors of all ranks are durable under their names.
        Every byte of a file is read once; memory: some 12 MiB. Raises, the same on all ranks, SaveFailed when a rank
        failed: then no new file is left.
        """
        own, parity = self._own, self._directory / parity_name(self._source.name)
        pieces: list[ParityPiece] = []

        def work() -> str:
            pieces.extend(_write_parity(self._council, own, self._source.origin, names.tmp(parity)))
            return sha256()

        with undone(names.tmp(parity)):
            slow = sum(own.sizes) / SLOW_DISK
            digests = self._council.agree(work, lambda found: found, otherwise=SaveFailed, extra_time=slow)
        members = tuple(member._replace(sha256=digests[member.rank]) for member in own.members)
        finished = replace(own, members=members, parity=tuple(pieces))
        descriptor = self._directory / descriptor_name(self._source.name)
        with undone(names.tmp(parity), parity, names.tmp(descriptor), descriptor):
            publish = functools.partial(_publish, self._directory, parity, finished)
            self._council.agree(publish, lambda _: None, otherwise=SaveFailed)
        return finished


def _agree_on_groups(council: Council, scheme: Scheme, mine: Member) -> Descriptor:
    """This rank's group; save id and digests are not filled in."""

    def decide(members: list[Member]) -> list[tuple[Member, ...]]:
        groups = form_groups(scheme, [member.domain for member in members]).groups
        return [tuple(members[rank] for rank in group) for group in groups]

    groups = council.agree(lambda: mine, decide, otherwise=SaveFailed)
    members = next(group for group in groups if mine in group)
    return Descriptor("", council.size, scheme, members.index(mine), members, ())


def _write_parity(council: Council, own: Descriptor, origin: InMemory, temporary: Path) -> Sequence[ParityPiece]:
    """Take part in the group's exchange; this rank's parity is durable under its temporary name then."""
    data, parity = MemberFile(own.member, DATA), MemberFile(own.member, PARITY)
    parts = planner.parity_parts(own.scheme, own.sizes, own.member)
    with Files({data: origin}, {parity: temporary} if parts else {}) as files:
        carry_out(council, [_on_ranks(c, own.ranks) for c in planner.encode(own.scheme, own.sizes)], files)
        size = max((part.offset + part.nbytes for part in parts), default=0)
        return files.finish({parity: size}).get(parity, ())


def _on_ranks(combination: Combination, ranks: Sequence[int]) -> Combination:
    """Members become the ranks that they are."""
    sources, targets = (
        tuple(replace(part, rank=ranks[part.rank]) for part in parts)
        for parts in (combination.sources, combination.targets)
    )
    return Combination(sources, targets, combination.factors)


def _publish(directory: Path, parity: Path, finished: Descriptor) -> None:
    if finished.parity:
        atomic.publish(names.tmp(parity), parity)
    write_descriptor(directory, finished)  # last: without it a parity file means nothing


# -- shared with `rebuild` ---------------------------------------------------------------------------------------------


def carry_out(council: Council, combinations: Sequence[Combination], files: Files) -> None:
    """**Collective.** Exchange bytes of files, as the work of an agreement: all that this rank has a part in."""
    exchange(council.comm, combinations, files.port(), timeout=council.timeout, tag=council.free_tag)


@contextlib.contextmanager
def undone(*paths: Path) -> Iterator[None]:
    """**Local.** When the block fails, remove `paths`. What cannot be removed is garbage for the next writer."""
    try:
        yield
    except CheckpointError:
        try:
            atomic.remove(*paths, missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove a file of a failed exchange, going on: %s", error)
        raise
