"""A directory as a store of objects: every put is a new file, fsynced, renamed into place, and its name fsynced."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mpi_ckpt.errors import RemoteFailed, RemoteRefused, from_os_error
from mpi_ckpt.storage import atomic, direct, names

# What no time changes, and nothing that runs. A full disk, or a server that is away, may be well again.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


class DirectoryObjects:
    """See ObjectStore. The version of an object is the sha256 of its bytes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = root.absolute().as_uri()  # names this very directory, whatever characters are in its name

    def check(self, *, writing: bool = False) -> None:
        """See ObjectStore. To write it has to be there, or to be made, and to take a file and let go of it."""
        with _explained():
            if writing:
                try:
                    _make_dir(self._root)
                except PermissionError:  # one that is there, below one that may only be passed through
                    if not self._root.is_dir():
                        raise
                probe = self._root / f"probe-{secrets.token_hex(8)}{names.TMP_SUFFIX}"
                atomic.write_file(probe, b"")
                atomic.remove(probe)
            with contextlib.suppress(FileNotFoundError):  # a directory that nobody has put anything into
                os.scandir(self._root).close()

    def put_stream(self, key: str, pieces: Iterable[np.ndarray], nbytes: int) -> None:
        """See ObjectStore."""
        path = self._root / key
        temporary = names.tmp(path)
        with _explained():
            _make_dir(path.parent)
            atomic.remove(temporary, missing_ok=True)
        try:
            written = self._write(temporary, pieces)
        except BaseException:
            with contextlib.suppress(OSError):
                atomic.remove(temporary, missing_ok=True)
            raise
        with _explained():
            if not os.path.samestat(written, os.lstat(temporary)):  # and that one may be half written
                raise FileExistsError(errno.EEXIST, "another one writes the same object", str(temporary))
            atomic.publish(temporary, path)

    @staticmethod
    def _write(temporary: Path, pieces: Iterable[np.ndarray]) -> os.stat_result:
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
                return os.fstat(fd)

    def put(self, key: str, data: bytes, replaces: str | None = None) -> bool:
        """See ObjectStore. Between two writers at the same moment a directory cannot decide: the lock has to."""
        held = self.get(key)
        if (held[1] if held else None) != replaces:
            return False
        with _explained():
            _make_dir((self._root / key).parent)
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


def _make_dir(path: Path) -> None:
    try:
        atomic.make_dir(path)
    except FileExistsError as error:  # as what is no directory
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from None


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, RemoteRefused if error.errno in _REFUSALS else RemoteFailed) from error


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
