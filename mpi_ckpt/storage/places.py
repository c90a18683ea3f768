"""Where a shard's bytes may lie, and how to read them there: a file, or an object of a remote store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mpi_ckpt.storage import direct, names
from mpi_ckpt.storage.object_store import open_store


class Reader(Protocol):
    """Bytes by offset; several threads may ask at once."""

    def size(self) -> int | None:
        """Bytes in all; None where there is nothing."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes from `offset` on, fewer only at the end."""

    def read_into(self, buffer: np.ndarray, offset: int, nbytes: int) -> int:
        """The same into `buffer` (uint8, of at least `nbytes` rounded up to a page); how many there are."""


@dataclass(frozen=True)
class FileReader:
    """A file, by its descriptor."""

    fd: int

    def size(self) -> int:
        """See Reader."""
        return os.fstat(self.fd).st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """See Reader."""
        return os.pread(self.fd, nbytes, offset)

    def read_into(self, buffer: np.ndarray, offset: int, nbytes: int) -> int:
        """See Reader."""
        return direct.read_into(self.fd, buffer, offset, nbytes)


@dataclass(frozen=True)
class RemoteFile:
    """A shard in a remote store; travels between ranks, each of which opens the store for itself."""

    url: str  # of the store
    key: str

    @property
    def name(self) -> str:
        """The last part of the key: a shard's plain file name."""
        return self.key.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.url}/{self.key}"

    def size(self) -> int | None:
        """See Reader."""
        return open_store(self.url).size(self.key)

    def read(self, offset: int, nbytes: int) -> bytes:
        """See Reader. Raises FileNotFoundError, RemoteFailed."""
        data = open_store(self.url).read(self.key, offset, nbytes)
        if data is None:
            raise FileNotFoundError(str(self))
        return data

    def read_into(self, buffer: np.ndarray, offset: int, nbytes: int) -> int:
        """See Reader. Raises FileNotFoundError, RemoteFailed."""
        data = self.read(offset, nbytes)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)


@dataclass(frozen=True)
class RemoteStep:
    """The files of one save in a remote store, as a directory is for those on a disk: `step / "rank00002.h5"`."""

    url: str
    step: int
    save_id: str

    @property
    def name(self) -> str:
        """The same as that of the step's directory."""
        return names.step_name(self.step)

    def __truediv__(self, file_name: str) -> RemoteFile:
        """The object of a shard, by its local name: the save id is in the key, whether or not it is in the name."""
        parsed = names.parse_shard(file_name)
        plain = names.shard_name(parsed[0]) if parsed else file_name
        return RemoteFile(self.url, f"{self.name}/{self.save_id}/{plain}")

    def __str__(self) -> str:
        return f"{self.url}/{self.name}"


Place = Path | RemoteFile
Directory = Path | RemoteStep
