"""A directory as a store of objects: every put is a new file, fsynced, renamed into place, and its name fsynced."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mpi_ckpt.errors import RemoteFailed, from_os_error
from mpi_ckpt.storage import atomic, direct, names


class DirectoryObjects:
    """See ObjectStore. The version of an object is the sha256 of its bytes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = f"file://{root}"

    def check(self) -> None:
        """The directory can be made, and written to."""
        with _explained():
            atomic.make_dir(self._root)
            probe = self._root / f"probe-{secrets.token_hex(8)}{names.TMP_SUFFIX}"
            atomic.write_file(probe, b"")
            atomic.remove(probe)

    def put_stream(self, key: str, pieces: Iterable[np.ndarray], nbytes: int) -> None:
        """See ObjectStore."""
        path = self._root / key
        temporary = names.tmp(path)
        with _explained():
            atomic.make_dir(path.parent)
            atomic.remove(temporary, missing_ok=True)
        try:
            self._write(temporary, pieces)
            with _explained():
                atomic.publish(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                atomic.remove(temporary, missing_ok=True)
            raise

    @staticmethod
    def _write(temporary: Path, pieces: Iterable[np.ndarray]) -> None:
        offset = 0
        with contextlib.ExitStack() as stack:
            with _explained():
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                fd = stack.enter_context(direct.opened(temporary, flags, cached=True))
            for piece in pieces:
                with _explained():
                    direct.write_all(fd, piece, offset)
                offset += piece.size
            with _explained():
                atomic.fsync_file(fd, temporary)

    def put(self, key: str, data: bytes, replaces: str | None = None) -> bool:
        """See ObjectStore. Between two writers at the same moment a directory cannot decide: the lock has to."""
        held = self.get(key)
        if (held[1] if held else None) != replaces:
            return False
        with _explained():
            atomic.make_dir((self._root / key).parent)
            atomic.write_file(self._root / key, data)
        return True

    def get(self, key: str) -> tuple[bytes, str] | None:
        """See ObjectStore."""
        with _explained():
            try:
                data = (self._root / key).read_bytes()
            except FileNotFoundError:
                return None
        return data, hashlib.sha256(data).hexdigest()

    def read(self, key: str, offset: int, nbytes: int) -> bytes | None:
        """See ObjectStore."""
        with _explained():
            try:
                with open(self._root / key, "rb") as file:
                    return os.pread(file.fileno(), nbytes, offset)
            except FileNotFoundError:
                return None

    def size(self, key: str) -> int | None:
        """See ObjectStore."""
        with _explained():
            try:
                return os.lstat(self._root / key).st_size
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> dict[str, int]:
        """See ObjectStore; half-written files are no objects."""
        found = {}
        with _explained():
            for directory, _, files in os.walk(self._root / prefix, onerror=_unless_missing):
                for name in files:
                    if not name.endswith(names.TMP_SUFFIX):
                        path = Path(directory, name)
                        with contextlib.suppress(FileNotFoundError):  # deleted at this moment
                            found[str(path.relative_to(self._root))] = path.lstat().st_size
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore; directories that are left empty go too."""
        with _explained():
            paths = [self._root / key for key in keys]
            present = [path for path in paths if path.parent.is_dir()]
            atomic.remove(*present, missing_ok=True)
            for directory in sorted({path.parent for path in present}, reverse=True):
                while directory != self._root:
                    try:
                        atomic.remove_dir(directory)
                    except OSError:  # something lies in it
                        break
                    directory = directory.parent


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, RemoteFailed) from error


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
