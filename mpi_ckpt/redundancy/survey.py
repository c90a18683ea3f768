"""What a node's directory still holds of a save."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.redundancy.descriptor import DESCRIPTOR_SUFFIX, Descriptor, parity_name, read_descriptor
from mpi_ckpt.redundancy.files import parity_is_intact
from mpi_ckpt.storage.shard_check import hash_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Descriptors of one save, every regular file by name with its bytes, and the names of those that are damaged."""

    descriptors: tuple[Descriptor, ...] = ()
    files: dict[str, int] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()


def survey(directory: Path, save_id: str, *, verify: Container[int] = ()) -> Found:
    """**Local.** Look at `directory`, which need not exist; the files of the ranks in `verify` are read and digested.

    Files of another size than their record, or of other bytes where that was looked at, count as lost: redundancy
    gives them back. So does a descriptor that cannot be read (logged). Raises OSError where the directory is there and
    cannot be listed.
    """
    try:
        with os.scandir(directory) as entries:
            files = {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}
    except FileNotFoundError:
        return Found()
    descriptors = []
    for name in sorted(files):
        if name.endswith(DESCRIPTOR_SUFFIX):
            with _noting(Path(directory, name)):
                descriptors.append(read_descriptor(Path(directory, name)))
    mine = tuple(found for found in descriptors if found.save_id == save_id)
    damaged = {name for found in mine if found.mine.rank in verify for name in _damaged(Path(directory), found, files)}
    return Found(mine, files, frozenset(damaged))


def _damaged(directory: Path, found: Descriptor, files: dict[str, int]) -> list[str]:
    """Those of a rank's two files whose digest is another one; sizes are compared by whoever uses them."""
    data, parity, wrong = found.mine.file, parity_name(found.mine.file), []
    for name, intact in (
        (data, lambda: hash_file(directory / data)[0] == found.mine.sha256),
        (parity, lambda: parity_is_intact(directory / parity, found.parity)),
    ):
        if name in files:
            fine = False
            with _noting(directory / name):
                fine = intact()
            if not fine:
                logger.warning("damaged, counts as lost: %s", directory / name)
                wrong.append(name)
    return wrong


@contextlib.contextmanager
def _noting(path: Path) -> Iterator[None]:
    """An error in the block is logged: what cannot be read is lost, no more."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        logger.warning("cannot read, counts as lost: %s: %s", path, error)
