"""Give every rank's file of a save its redundancy, before the save becomes visible."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.exchange import Combination, exchange
from mpi_ckpt.errors import CheckpointError, RankSilent, SaveFailed
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.descriptor import (
    Descriptor,
    Member,
    ParityPiece,
    descriptor_name,
    parity_name,
    write_descriptor,
)
from mpi_ckpt.redundancy.files import Files, Reader
from mpi_ckpt.redundancy.groups import form_groups
from mpi_ckpt.redundancy.planner import DATA, PARITY, MemberFile
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage import atomic, names

logger = logging.getLogger(__name__)

SLOW_DISK = 10e6  # bytes a second that even a bad day's disk reaches: stretches timeouts for large files


class FileRecord(Protocol):
    """What is known of a file: a shard's record has it."""

    @property
    def nbytes(self) -> int: ...
    @property
    def sha256(self) -> str: ...


@dataclass(frozen=True)
class Source:
    """A rank's file that is to be protected: its final plain name, its size, and where its bytes are read from.

    `read(lo, buffer, n)` puts the bytes lo..lo+n-1 into a page-aligned uint8 buffer: from memory, say, while the file
    is still being written. `sha256()` is asked last, and may wait for that; what it raises fails the save.
    """

    name: str
    nbytes: int
    read: Path | Reader
    sha256: Callable[[], str]

    @classmethod
    def of_file(cls, path: Path, record: FileRecord) -> Source:
        """A file that is complete. It is read past the page cache."""
        return cls(path.name, record.nbytes, path, lambda: record.sha256)


def protect(
    council: Council, scheme: Scheme, domain: str, source: Source, directory: Path, *, save_id: str
) -> Descriptor:
    """**Collective.** Write this rank's parity file and its descriptor into `directory`, that of its node.

    Each rank gives its own file and its failure domain; scheme and save_id are the same on all. When this returns,
    parity and descriptors of all ranks are durable under their names. Every byte of a file is read once; memory: some
    12 MiB. Raises, the same on all ranks, CheckpointError where the domains cannot protect each other, SaveFailed when
    a rank failed: then no new file is left.
    """
    directory = Path(directory)
    own = _agree_on_groups(council, scheme, Member(council.rank, domain, source.name, source.nbytes, ""), source)
    parity = directory / parity_name(source.name)
    pieces: list[ParityPiece] = []

    def work() -> str:
        pieces.extend(_write_parity(run, own, source.read, names.tmp(parity)))
        return source.sha256()

    with undone(names.tmp(parity)), duplicate(council) as run:
        slow = sum(own.sizes) / SLOW_DISK
        digests = council.agree(work, lambda found: found, otherwise=SaveFailed, extra_time=slow)
    members = tuple(member._replace(sha256=digests[member.rank]) for member in own.members)
    finished = replace(own, save_id=save_id, members=members, parity=tuple(pieces))
    with undone(names.tmp(parity), parity, directory / descriptor_name(source.name)):
        council.agree(lambda: _publish(directory, parity, finished), lambda _: None, otherwise=SaveFailed)
    return finished


def _agree_on_groups(council: Council, scheme: Scheme, mine: Member, source: Source) -> Descriptor:
    """This rank's group; save id and digests are not filled in."""

    def work() -> Member:
        found = source.read.stat().st_size if isinstance(source.read, Path) else mine.nbytes
        if found != mine.nbytes:
            raise SaveFailed(
                "the file to protect is not what was written",
                path=source.read,
                found=f"{found} bytes",
                expected=f"{mine.nbytes} bytes",
                action="See what else writes to this directory.",
            )
        return mine

    def decide(members: list[Member]) -> list[tuple[Member, ...]]:
        groups = form_groups(scheme, [member.domain for member in members]).groups
        return [tuple(members[rank] for rank in group) for group in groups]

    groups = council.agree(work, decide, otherwise=SaveFailed)
    members = next(group for group in groups if mine in group)
    return Descriptor("", council.size, scheme, members.index(mine), members, ())


def _write_parity(run: Runner, own: Descriptor, read: Path | Reader, temporary: Path) -> Sequence[ParityPiece]:
    """Take part in the group's exchange; this rank's parity is durable under its temporary name then."""
    data, parity = MemberFile(own.member, DATA), MemberFile(own.member, PARITY)
    parts = planner.parity_parts(own.scheme, own.sizes, own.member)
    with Files({data: read}, {parity: temporary} if parts else {}) as files:
        run([_on_ranks(c, own.ranks) for c in planner.encode(own.scheme, own.sizes)], files)
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

Runner = Callable[[Sequence[Combination], Files], None]


@contextlib.contextmanager
def duplicate(council: Council) -> Iterator[Runner]:
    """**Collective.** Something that runs exchanges on a communicator of their own."""
    comm = council.comm.Dup()  # the council's own messages use every tag

    def run(combinations: Sequence[Combination], files: Files) -> None:
        exchange(comm, combinations, files.port(), timeout=council.timeout)

    try:
        yield run
    except RankSilent:
        raise  # messages may be under way on it: it is never freed
    except BaseException:
        comm.Free()
        raise
    comm.Free()


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
