"""The files of an exchange on one rank: read and written in lanes, past the page cache, with the crc32c of it all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from mpi_ckpt.comm.combination import Part
from mpi_ckpt.comm.exchange import Port
from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.redundancy.coder import combine
from mpi_ckpt.redundancy.descriptor import ParityPiece
from mpi_ckpt.storage import atomic, direct
from mpi_ckpt.storage.crc import crc32c, hexadecimal
from mpi_ckpt.storage.read_ahead import read_ahead, stretch
from mpi_ckpt.storage.shard_check import corrupt, opened
from mpi_ckpt.storage.staging import Lane, staging


class InMemory(Protocol):
    """A file's bytes from memory, while it is still being written, say."""

    def view(self, lo: int, n: int) -> np.ndarray | None:
        """The bytes lo..lo+n-1 where they lie, uint8; None if they do not lie there as the file has them."""

    def read(self, lo: int, buffer: np.ndarray, n: int) -> object:
        """Put the bytes lo..lo+n-1 into `buffer` (uint8). Called by a thread of its own."""


@dataclass
class _Passed:
    """What has been written of one part, whose bytes come in order."""

    nbytes: int = 0
    crc32c: int = 0


class Files:
    """`sources` and `targets`: paths by the name that the exchange has for a file. Targets are made, or made empty.

    A source may be InMemory instead, for bytes that are in no file, or in memory as well.
    **Local.** Use it as a context manager: when it is left no thread of it is alive and every descriptor is closed.
    Errors come out of the futures, and of `finish`, never out of `open`: a rank whose disk fails must not miss the
    exchange. A source that its disk cannot read (EIO), or that is too short, is CorruptShard.
    """

    def __init__(self, sources: Mapping[Any, Path | InMemory], targets: Mapping[Any, Path]) -> None:
        self._sources, self._targets = sources, targets
        self._open: dict[Path, int] = {}
        self._passed: dict[tuple[Any, int], _Passed] = {}
        self._resources = contextlib.ExitStack()
        self._reading, self._writing = (Lane(f"mpi_ckpt {name}") for name in ("read", "write"))

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lanes = (self._reading, self._writing)
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join()
        self._resources.__exit__(kind, error, None)

    def port(self) -> Port:
        """What an exchange needs to know of the files."""
        return Port(
            view=self._view,
            read=lambda part, lo, buffer, n: self._reading.submit(self._read, part, lo, buffer, n),
            write=self._write,
            combine=combine,
        )

    def finish(self, sizes: Mapping[Any, int]) -> dict[Any, tuple[ParityPiece, ...]]:
        """Give each target its size and make its bytes durable; the parts written to it, by ascending offset."""
        for file, path in self._targets.items():
            fd = self._target(file)
            with atomic.naming(path):
                os.ftruncate(fd, sizes[file])  # direct I/O wrote whole pages
            atomic.fsync_file(fd, path)
        found: dict[Any, list[ParityPiece]] = {file: [] for file in self._targets}
        for (file, offset), part in sorted(self._passed.items(), key=lambda item: item[0][1]):
            found[file].append(ParityPiece(offset, part.nbytes, hexadecimal(part.crc32c)))
        return {file: tuple(pieces) for file, pieces in found.items()}

    def _descriptor(self, path: Path, flags: int) -> int:
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = self._resources.enter_context(direct.opened(path, flags))
        return found

    def _target(self, file: Any) -> int:
        return self._descriptor(self._targets[file], os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def _view(self, part: Part, lo: int, n: int) -> np.ndarray | None:
        source = self._sources[part.file]
        return None if isinstance(source, Path) else source.view(part.offset + lo, n)

    def _read(self, part: Part, lo: int, buffer: np.ndarray, n: int) -> None:
        source, lo = self._sources[part.file], part.offset + lo
        if not isinstance(source, Path):
            source.read(lo, buffer, n)
            return
        with atomic.naming(source), _lost_where_unreadable(source):
            found = direct.read_into(self._descriptor(source, os.O_RDONLY), buffer, lo, n)
        if found < n:
            raise CorruptShard(
                "a file is shorter than its record",
                path=source,
                found=f"{lo + found} bytes",
                expected=f"at least {lo + n} bytes",
                action="See what changed it; `verify` tells which other files are damaged.",
            )

    def _write(self, part: Part, lo: int, buffer: np.ndarray, n: int) -> Future[None]:
        buffer[n : direct.align_up(n)] = 0
        passed = self._passed.setdefault((part.file, part.offset), _Passed())
        passed.nbytes += n
        passed.crc32c = crc32c(buffer[:n], passed.crc32c)
        return self._writing.submit(self._write_pages, part, lo, buffer[: direct.align_up(n)])

    def _write_pages(self, part: Part, lo: int, pages: np.ndarray) -> None:
        with atomic.naming(self._targets[part.file]):
            direct.write_all(self._target(part.file), pages, part.offset + lo)


@contextlib.contextmanager
def _lost_where_unreadable(path: Path) -> Iterator[None]:
    """Bytes that the disk cannot read are lost like changed ones: other files may give them back."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        what, expected = "the disk cannot read a file", f"the bytes of {path.name}"
        raise corrupt(path, what, found=error, expected=expected) from error


def parity_is_intact(path: Path, pieces: Sequence[ParityPiece]) -> bool:
    """**Local.** Read a parity file and compare the crc32c of its pieces.

    Raises MissingShard, CorruptShard where the disk cannot read it, OSError."""
    with opened(path) as reader, staging("read", "read") as (slots, lanes):
        for piece in pieces:
            crc = 0
            for read in read_ahead(reader, stretch(piece.offset, piece.offset + piece.nbytes), slots, lanes):
                crc = crc32c(read.data, crc)
            if hexadecimal(crc) != piece.crc32c:
                return False
    return True
