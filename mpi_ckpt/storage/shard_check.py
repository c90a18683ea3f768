"""Whether a shard is what its record says: presence, size and kind of file, and the digests of all its bytes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mpi_ckpt.errors import CorruptShard, MissingShard
from mpi_ckpt.storage import direct, names
from mpi_ckpt.storage.crc import crc32c, hexadecimal
from mpi_ckpt.storage.places import FileReader, Place, Reader
from mpi_ckpt.storage.read_ahead import read_ahead, stretch
from mpi_ckpt.storage.records import ShardRecord
from mpi_ckpt.storage.staging import staging

_ACTION = "Restore an older step (on_damage='older', --on-damage older), or bring the file back from a copy."


def check_structure(path: Place, record: ShardRecord) -> None:
    """**Local.** Look at the file without reading it. Raises MissingShard, or CorruptShard for another size or kind."""
    size = _size_of(path) if isinstance(path, Path) else path.size()
    if size is None:
        raise missing(path)
    if size != record.nbytes:
        found, expected = f"{size} bytes", f"{record.nbytes} bytes"
        raise corrupt(path, "a shard's size differs from the manifest", found=found, expected=expected)


def _size_of(path: Path) -> int | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise corrupt(
            path, "a shard must be a regular file", found=stat.filemode(status.st_mode), expected="-rw-r--r--"
        )
    return status.st_size


def verify_file(path: Place, record: ShardRecord, verify: str = "full") -> None:
    """**Local.** Read the whole file and compare it with its record: sha256 and crc32c, or with "quick" crc32c alone.

    Raises MissingShard or CorruptShard; OSError from the disk.
    """
    if verify not in ("full", "quick"):
        raise ValueError(f"verify: found {verify!r}, expected 'full' or 'quick'")
    check_structure(path, record)
    sha256, crc = _digests(path, with_sha256=verify == "full")
    if (sha256, crc) != (record.sha256 if sha256 else None, record.crc32c):
        raise differs(path, found=_describe(sha256, crc), expected=_describe(sha256 and record.sha256, record.crc32c))


def hash_file(path: Place) -> tuple[str, str]:
    """**Local.** (sha256, crc32c) of a file of any size, as the manifest writes them, in 12 MiB of memory.

    One pass, past the page cache where that is possible. Raises MissingShard; OSError from the disk.
    """
    sha256, crc = _digests(path, with_sha256=True)
    return str(sha256), crc


def _digests(path: Place, *, with_sha256: bool) -> tuple[str | None, str]:
    sha256, crc = hashlib.sha256(), 0
    with opened(path) as reader, staging("sha256", "read", "read") as (slots, (hashing, *reading)):
        for piece in read_ahead(reader, stretch(0, reader.size() or 0), slots, reading):
            if with_sha256:
                piece.slot.jobs.append(hashing.submit(sha256.update, piece.data))
            crc = crc32c(piece.data, crc)
        for slot in slots:
            slot.settle()
    return sha256.hexdigest() if with_sha256 else None, hexadecimal(crc)


def _describe(sha256: str | None, crc: str) -> str:
    return f"crc32c {crc}" if sha256 is None else f"sha256 {sha256}, crc32c {crc}"


@contextlib.contextmanager
def opened(path: Place, *, cached: bool = False) -> Iterator[Reader]:
    """A reader of a shard, `cached` for small reads at any offset.

    Raises MissingShard, or CorruptShard where a symbolic link stands in its place or the disk cannot read it (EIO).
    """
    if not isinstance(path, Path):
        try:
            yield path
        except FileNotFoundError:
            raise missing(path) from None
        return
    try:
        with direct.opened(path, os.O_RDONLY, cached=cached) as fd:
            yield FileReader(fd)
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            found, expected = "a symbolic link", "a regular file"
            raise corrupt(path, "a shard must be a regular file", found=found, expected=expected) from None
        if error.errno == errno.EIO:  # lost bytes, like changed ones: an older step may be whole
            expected = f"the bytes of {path.name}"
            raise corrupt(path, "the disk cannot read a shard", found=error, expected=expected) from error
        raise


def missing(path: Place) -> MissingShard:
    """The error for a shard that is not there."""
    return MissingShard(
        "a shard that the manifest lists is missing",
        path=path,
        rank=_rank(path),
        found="no such file",
        expected="the file",
        action=_ACTION,
    )


def differs(path: Place, *, found: str, expected: str) -> CorruptShard:
    """The error for bytes that are not those that were saved."""
    return corrupt(path, "a shard's bytes are not those that were saved", found=found, expected=expected)


def corrupt(path: Place, what: str, *, found: object, expected: object) -> CorruptShard:
    """The error for a shard that is not what it was; the rank is read from the file's name."""
    return CorruptShard(what, path=path, rank=_rank(path), found=found, expected=expected, action=_ACTION)


def _rank(path: Place) -> int | None:
    parsed = names.parse_shard(path.name)
    return parsed[0] if parsed else None
