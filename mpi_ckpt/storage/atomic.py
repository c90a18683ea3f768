"""The one door to durable change: the only fsync, rename, unlink and mkdir in the project.

What a power cut leaves behind is decided by the order of operations, on a POSIX file system:
  - a file's bytes are safe once *the file* was fsynced; before that a rename may survive that its bytes do not;
  - a name (new, changed, removed) is safe once *its directory* was fsynced.
Hence always: write, fsync the file, rename, fsync the directory. Names in one directory may be made safe by one fsync.

An OSError from any of these, close included, is a failure and reaches the caller with its errno and a path.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from mpi_ckpt.storage import names


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that carries no path (those of descriptors: write, fsync, close) this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def fsync_file(fd: int, path: Path) -> None:
    """Make the bytes and the size of an open file durable."""
    with naming(path):
        os.fsync(fd)


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    with naming(path), _opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network and FUSE file systems have no fsync of directories; their names need none or have no help.
            if error.errno != errno.EINVAL:
                raise


def make_dir(path: Path) -> None:
    """Make a directory, and its missing parents, durably. It is fine if it exists: its name is made safe again."""
    path = Path(path)
    try:
        os.mkdir(path)
    except FileNotFoundError:
        make_dir(path.parent)
        with contextlib.suppress(FileExistsError):  # another process may have been quicker
            os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    # Also when it was there: whoever made it may have died before this line.
    fsync_dir(path.parent)


def write_file(path: Path, data: bytes | str) -> None:
    """Put a small file in place, whole or not at all; text as UTF-8."""
    publish(stage_file(path, data), path)


def stage_file(path: Path, data: bytes | str) -> Path:
    """Make a small file durable under the temporary name of `path`, which is returned; `publish` may follow."""
    temporary = names.tmp(Path(path))
    with naming(temporary), _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW) as fd:
        rest = memoryview(data.encode() if isinstance(data, str) else data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    return temporary


def publish(temporary: Path, final: Path) -> None:
    """Rename within one directory, durably; `final` is replaced. The bytes of `temporary` must have been fsynced.

    When this raises, the rename may or may not have happened: look, or take it back with `remove`.
    """
    os.rename(temporary, final)
    fsync_dir(Path(final).parent)


def remove(*paths: Path, missing_ok: bool = False) -> None:
    """Unlink files durably, in the order given, then one fsync for each directory; `missing_ok`: gone is gone."""
    accepted = (FileNotFoundError,) if missing_ok else ()
    for path in paths:
        with contextlib.suppress(*accepted):
            os.unlink(path)
    for directory in dict.fromkeys(Path(path).parent for path in paths):
        fsync_dir(directory)


def remove_dir(path: Path) -> None:
    """Remove an empty directory durably; OSError ENOTEMPTY when something, a foreign file for one, lies in it."""
    os.rmdir(path)
    fsync_dir(Path(path).parent)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[None]:
    """Close `fd` at the end. An error of close is a failure, unless something failed before it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    os.close(fd)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    with closing(fd):
        yield fd
