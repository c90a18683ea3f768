"""Whether the redundancy beside a shard is what was recorded: for those who look, and repair nothing."""

from __future__ import annotations

import os
from pathlib import Path

from mpi_ckpt.errors import CheckpointError, CorruptShard, InvalidManifest, MissingShard
from mpi_ckpt.redundancy.descriptor import Descriptor, descriptor_name, parity_name, read_descriptor
from mpi_ckpt.redundancy.files import parity_is_intact
from mpi_ckpt.storage.records import ShardRecord

_ACTION = "A restore makes it again by itself, and so does `repair`."


def verify_redundancy(directory: Path, record: ShardRecord, save_id: str) -> None:
    """**Local.** Compare a rank's descriptor with its shard's record, and its parity file with the descriptor: size,
    and the crc32c of its pieces.

    Raises MissingShard, CorruptShard, InvalidManifest, UnknownSchema; OSError from the disk.
    """
    found = _check_descriptor(directory / descriptor_name(record.path), record, save_id)
    if not found.parity:
        return
    path, nbytes = directory / parity_name(record.path), found.parity_nbytes
    if not os.path.lexists(path):
        raise _error(MissingShard, "a parity file is missing", path, record)
    if path.lstat().st_size != nbytes:
        what, size = "a parity file has another size than its descriptor says", path.lstat().st_size
        raise _error(CorruptShard, what, path, record, f"{size} bytes", f"{nbytes} bytes")
    if not parity_is_intact(path, found.parity):
        what, expected = "a parity file is not what was written", ", ".join(piece.crc32c for piece in found.parity)
        raise _error(CorruptShard, what, path, record, "other checksums", f"crc32c {expected} of its pieces")


def _check_descriptor(path: Path, record: ShardRecord, save_id: str) -> Descriptor:
    try:
        found = read_descriptor(path)
    except FileNotFoundError:
        raise _error(MissingShard, "a redundancy descriptor is missing", path, record) from None
    mine = (found.save_id, found.mine.rank, found.mine.nbytes, found.mine.sha256)
    expected = (save_id, record.rank, record.nbytes, record.sha256)
    if mine != expected:
        what = "a redundancy descriptor is of another file than the manifest's"
        raise _error(InvalidManifest, what, path, record, _in_words(*mine), _in_words(*expected))
    return found


def _in_words(save_id: str, rank: int, nbytes: int, sha256: str) -> str:
    return f"rank {rank} of save {save_id}, {nbytes} bytes, sha256 {sha256}"


def _error(
    kind: type[CheckpointError],
    what: str,
    path: Path,
    record: ShardRecord,
    found: object = "no such file",
    expected: object = "the file",
) -> CheckpointError:
    return kind(what, path=path, rank=record.rank, found=found, expected=expected, action=_ACTION)
