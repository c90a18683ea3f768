"""The files of an exchange on one rank: read and written in lanes, past the page cache, and digested as they pass."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mpi_ckpt.comm.exchange import Part, Port
from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.redundancy.coder import combine
from mpi_ckpt.redundancy.descriptor import ParityPiece
from mpi_ckpt.storage import atomic, direct
from mpi_ckpt.storage.crc import crc32c, hexadecimal
from mpi_ckpt.storage.read_ahead import read_ahead, stretch
from mpi_ckpt.storage.shard_check import opened
from mpi_ckpt.storage.staging import Lane, staging

# Puts n bytes of a file, from one on, into a buffer: read(lo, buffer, n). Called by a thread of its own.
Reader = Callable[[int, np.ndarray, int], object]


@dataclass
class _Digests:
    """Of one part, whose bytes come in order."""

    nbytes: int = 0
    crc32c: int = 0
    sha256: Any = field(default_factory=hashlib.sha256)


class Files:
    """`sources` and `targets`: paths by the name that the exchange has for a file. Targets are made, or made empty.

    A source may be a Reader instead, for bytes that are in no file, or in memory as well.
    **Local.** Use it as a context manager: when it is left no thread of it is alive and every descriptor is closed.
    Errors come out of the futures, and of `finish`, never out of `open`: a rank whose disk fails must not miss the
    exchange.
    """

    def __init__(self, sources: Mapping[Any, Path | Reader], targets: Mapping[Any, Path]) -> None:
        self._sources, self._targets = sources, targets
        self._open: dict[Path, int] = {}
        self._digests: dict[tuple[Any, int], _Digests] = {}
        self._resources = contextlib.ExitStack()
        self._reading, self._writing, self._hashing = (Lane(f"mpi_ckpt {name}") for name in ("read", "write", "sha256"))

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lanes = (self._reading, self._writing, self._hashing)
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join()
        self._resources.__exit__(kind, error, None)

    def port(self) -> Port:
        """What an exchange needs to know of the files."""
        return Port(
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
        for (file, offset), d in sorted(self._digests.items(), key=lambda item: item[0][1]):
            found[file].append(ParityPiece(offset, d.nbytes, d.sha256.hexdigest(), hexadecimal(d.crc32c)))
        return {file: tuple(pieces) for file, pieces in found.items()}

    def _descriptor(self, path: Path, flags: int) -> int:
        found = self._open.get(path)
        if found is None:
            found = self._open[path] = self._resources.enter_context(direct.opened(path, flags))
        return found

    def _target(self, file: Any) -> int:
        return self._descriptor(self._targets[file], os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def _read(self, part: Part, lo: int, buffer: np.ndarray, n: int) -> None:
        source, lo = self._sources[part.file], part.offset + lo
        if not isinstance(source, Path):
            source(lo, buffer, n)
            return
        with atomic.naming(source):
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
        digests = self._digests.setdefault((part.file, part.offset), _Digests())
        hashed = self._hashing.submit(_digest, digests, buffer[:n])
        return self._writing.submit(self._write_pages, part, lo, buffer[: direct.align_up(n)], hashed)

    def _write_pages(self, part: Part, lo: int, pages: np.ndarray, hashed: Future[None]) -> None:
        with atomic.naming(self._targets[part.file]):
            direct.write_all(self._target(part.file), pages, part.offset + lo)
        hashed.result()


def _digest(digests: _Digests, data: np.ndarray) -> None:
    digests.nbytes += data.size
    digests.crc32c = crc32c(data, digests.crc32c)
    digests.sha256.update(data)


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
