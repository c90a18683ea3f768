"""After a loss: every rank's files on its own node again, from what the nodes still hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.redundancy.descriptor import Member, ParityPiece, descriptor_name, parity_name, write_descriptor
from mpi_ckpt.redundancy.files import Files
from mpi_ckpt.redundancy.planner import DATA, PARITY
from mpi_ckpt.redundancy.protect import carry_out, undone
from mpi_ckpt.redundancy.recovery import (
    FileKey,
    Place,
    Recovery,
    Report,
    Vote,
    plan_new_groups,
    plan_recovery,
    speakers,
)
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.redundancy.survey import Found
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.direct import SLOW_DISK
from mpi_ckpt.storage.records import ShardRecord
from mpi_ckpt.storage.shard_check import hash_file, verify_file


def rebuild(
    council: Council,
    directory: Path,
    look: Callable[[bool], Found],
    domain: str,
    *,
    save_id: str,
    records: Sequence[ShardRecord],
    verify: bool = False,
) -> Report:
    """**Collective.** Bring the files of each rank of the save into the `directory` of the node it now runs on.

    `look(verify)`, collective, gives what `survey` sees there, having read every file or not; `domain` is the failure
    domain of this rank, by any name; `records` are the save's shards by rank. Files are read with `verify`, and where
    parity has to be made that could be compared with nothing.

    A file that lies on another node is sent from there, one that lies on none is made again by the group's scheme,
    parity too; descriptors name the present domains. Data that lie somewhere need no descriptor. Data are compared by
    sha256 before they get their name. Works for any number of ranks (`recovery`); copies that lie elsewhere are left
    there.

    Raises, the same on all ranks, LostBeyondScheme when the scheme cannot give a file back; CorruptShard when a file
    that was made again is not what was saved, because another one is damaged: then again with `verify`;
    CheckpointError when a disk fails. No new file is left then.
    """
    directory = Path(directory)
    place = Place(domain, str(directory))
    telling = council.agree(lambda: place, speakers)

    def planned(found: Found) -> Recovery:
        vote = Vote(place, found if council.rank in telling else Found(damaged=found.damaged))
        return council.agree(lambda: vote, lambda votes: plan_recovery(votes, save_id, records))

    plan = planned(found := look(verify))
    if plan.is_unchecked and not verify:
        plan = planned(found := look(True))
    mine = {key: directory / plan.names[key] for key, host in plan.targets.items() if host == council.rank}
    written: dict[FileKey, tuple[ParityPiece, ...]] = {}
    extra_time = 2 * sum(map(plan.nbytes, plan.targets)) / SLOW_DISK
    council.everywhere(lambda: atomic.make_dir(directory) if mine else None)
    with undone(*map(names.tmp, mine.values())):
        council.agree(
            lambda: written.update(_write(council, plan, mine, directory)), lambda _: None, extra_time=extra_time
        )
        council.agree(lambda: _publish(plan, mine, written, _hosted(plan, council), found, directory), lambda _: None)
    return plan.report


def protect_anew(
    council: Council, directory: Path, domain: str, scheme: Scheme, *, save_id: str, records: Sequence[ShardRecord]
) -> Report:
    """**Collective.** New groups, by `scheme`, of the nodes that the save's files lie on now, instead of the old ones.

    Every rank's node holds the data of each rank it looks after, as `rebuild` leaves them: they are read and compared
    once more, for parity of other bytes gives nothing back. Raises Unprotected, CorruptShard, CheckpointError; where
    the files are being renamed then, those of every rank go: the save is left whole, and bare.
    """
    directory = Path(directory)
    place = Place(domain, str(directory))
    plan = council.agree(lambda: place, lambda places: plan_new_groups(places, scheme, save_id, records))
    hosted = _hosted(plan, council)
    mine = {key: directory / plan.names[key] for key, host in plan.targets.items() if host == council.rank}
    pieces: dict[FileKey, tuple[ParityPiece, ...]] = {}

    def write() -> None:
        pieces.update(_write(council, plan, mine, directory))
        for rank in range(council.rank, len(records), council.size):
            verify_file(directory / records[rank].path, records[rank])

    data = [plan.names[FileKey(index, member, DATA)] for index, member in hosted]
    files = [directory / name(file) for file in data for name in (parity_name, descriptor_name)]
    with undone(*map(names.tmp, files)):
        council.agree(write, lambda _: None, extra_time=2 * sum(r.nbytes for r in records) / SLOW_DISK)
    with undone(*map(names.tmp, files), *files):
        council.agree(lambda: _publish(plan, mine, pieces, hosted, Found(), directory), lambda _: None)
    return plan.report


def _write(
    council: Council, plan: Recovery, mine: dict[FileKey, Path], directory: Path
) -> dict[FileKey, tuple[ParityPiece, ...]]:
    """Take part in the exchange; this rank's files are durable and verified under their temporary names then."""
    targets = {key: names.tmp(path) for key, path in mine.items()}
    with Files({key: directory / name for key, name in plan.names.items()}, targets) as files:
        carry_out(council, plan.combinations, files)
        pieces = files.finish({key: plan.nbytes(key) for key in targets})
    for key, path in targets.items():
        member = plan.groups[key.group].members[key.member]
        if key.kind == DATA:
            verify_rebuilt(path, member)
        else:
            verify_parity(path, member, pieces[key], plan.parity.get(key, pieces[key]))
    return pieces


def verify_rebuilt(path: Path, member: Member) -> None:
    """**Local.** Read a member's data back from `path`, a temporary name. Raises CorruptShard where they are others."""
    _compare(path, member, f"sha256 {hash_file(path)[0]}", f"sha256 {member.sha256}")


def verify_parity(path: Path, member: Member, found: Sequence[ParityPiece], known: Sequence[ParityPiece]) -> None:
    """**Local.** Parity that was moved is what was sent. Raises CorruptShard where it is not."""
    found_crc, known_crc = (", ".join(f"crc32c {piece.crc32c}" for piece in pieces) for pieces in (found, known))
    _compare(path, member, found_crc, known_crc)


def _compare(path: Path, member: Member, found: object, expected: object) -> None:
    if found != expected:
        raise CorruptShard(
            "a file that redundancy gave back is not what was saved",
            path=names.published(path),
            rank=member.rank,
            found=found,
            expected=expected,
            action="A file that it was made from is damaged: find it by `verify`, and repair again without it.",
        )


def _hosted(plan: Recovery, council: Council) -> list[tuple[int, int]]:
    """Group and place of each member whose files this rank looks after."""
    return [
        (index, place)
        for index, group in enumerate(plan.groups)
        for place, rank in enumerate(group.ranks)
        if rank % council.size == council.rank
    ]


def _publish(
    plan: Recovery,
    mine: dict[FileKey, Path],
    written: dict[FileKey, tuple[ParityPiece, ...]],
    hosted: list[tuple[int, int]],
    found: Found,
    directory: Path,
) -> None:
    for path in mine.values():
        atomic.publish(names.tmp(path), path)
    for index, place in hosted:
        key = FileKey(index, place, PARITY)
        descriptor = plan.groups[index].at(place, written.get(key, plan.parity.get(key, ())))
        if descriptor not in found.descriptors:
            write_descriptor(directory, descriptor)
