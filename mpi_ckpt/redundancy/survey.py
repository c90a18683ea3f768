"""What a node's directory still holds of a save."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.redundancy.descriptor import DESCRIPTOR_SUFFIX, Descriptor, parity_name, read_descriptor
from mpi_ckpt.redundancy.files import parity_is_intact
from mpi_ckpt.storage.records import ShardRecord
from mpi_ckpt.storage.shard_check import hash_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Descriptors of one save, every regular file by name with its bytes, and the names of those that are damaged."""

    descriptors: tuple[Descriptor, ...] = ()
    files: dict[str, int] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()


def survey(directory: Path, save_id: str, records: Sequence[ShardRecord] = (), *, verify: Container[int] = ()) -> Found:
    """**Local.** Look at `directory`, which need not exist; the files of the ranks in `verify` are read and digested.

    Data are compared with the save's `records`, whatever lies beside them: what has a shard's name and size may be of
    another save, where a node was away for a while. Parity is compared with its descriptor. Files of another size than
    their record, or of other bytes where that was looked at, count as lost: redundancy gives them back. So does a
    descriptor that cannot be read (logged). Raises OSError where the directory is there and cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            files = {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}
    except FileNotFoundError:
        return Found()
    directory, descriptors = Path(directory), []
    for name in sorted(files):
        if name.endswith(DESCRIPTOR_SUFFIX):
            with _noting(directory / name):
                descriptors.append(read_descriptor(directory / name))
    mine = tuple(found for found in descriptors if found.save_id == save_id)
    checks = _checks(directory, [r for r in records if r.rank in verify], [d for d in mine if d.mine.rank in verify])
    damaged = frozenset(n for n, check in checks.items() if n in files and _fails(directory / n, save_id, check))
    return Found(mine, files, damaged)


def _checks(
    directory: Path, records: Sequence[ShardRecord], descriptors: Sequence[Descriptor]
) -> dict[str, Callable[[], bool]]:
    """By name, whether a file's bytes are the right ones; sizes are compared by whoever uses them."""
    checks: dict[str, Callable[[], bool]] = {}
    for record in records:
        checks[record.path] = functools.partial(_has_digest, directory / record.path, record.sha256)
    for found in descriptors:
        name = parity_name(found.mine.file)
        checks[name] = functools.partial(parity_is_intact, directory / name, found.parity)
    return checks


def _has_digest(path: Path, sha256: str) -> bool:
    return hash_file(path)[0] == sha256


def _fails(path: Path, save_id: str, check: Callable[[], bool]) -> bool:
    with _noting(path):
        if check():
            return False
        # Not "damaged": it may be whole, and another save's that is looked for next.
        logger.warning("not what save %s wrote, which counts it as lost: %s", save_id, path)
    return True


@contextlib.contextmanager
def _noting(path: Path) -> Iterator[None]:
    """An error in the block is logged: what cannot be read is lost, no more."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        logger.warning("cannot read, counts as lost: %s: %s", path, error)
