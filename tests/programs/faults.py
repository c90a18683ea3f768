"""Between a process and its files: sees every change below a directory, and makes a disk fail, or the process die.

Functions of `os` are replaced for the time of a `with`; nothing in the product knows of it. Only what changes the
directory is seen: names made, moved and removed, bytes written, and the calls that make either durable.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DURABLE = ("mkdir", "rmdir", "unlink", "rename", "fsync")  # what the order of the protocol is made of
_OF_PATHS = ("open", "mkdir", "rmdir", "unlink", "rename")
_OF_DESCRIPTORS = ("write", "pwrite", "ftruncate", "fsync", "close")
_PAGE = 4096  # O_DIRECT wants whole ones


@dataclass(frozen=True)
class Operation:
    """One call, and the path below the watched directory that it is about: of a rename, the new name."""

    call: str
    path: str

    def __str__(self) -> str:
        return f"{self.call} {self.path}"


Around = Callable[[Operation], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def watched(root: Path, around: Around, *, cut: bool = False) -> Iterator[None]:
    """Enter `around(operation)` for every change below `root`, in the thread that makes it.

    An OSError on entering comes out of the call, which has then not happened (close: it has, as on Linux). With `cut`
    the first write to a file is a short one, as any system may make it, so that there are moments with half the bytes.
    """
    genuine = {call: getattr(os, call) for call in _OF_PATHS + _OF_DESCRIPTORS}
    prefix = os.fspath(root)

    def watch(call: str) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            path = _path(call, args)
            if path != prefix and not path.startswith(prefix + "/"):
                return genuine[call](*args, **kwargs)
            operation = Operation(call, os.path.relpath(path, prefix))
            if call == "close":
                genuine[call](*args, **kwargs)
            try:
                with around(operation):
                    if call != "close":
                        return genuine[call](*(_shortened(call, args) if cut else args), **kwargs)
            except OSError as error:
                if call in _OF_PATHS and error.filename is None:  # those of descriptors carry no path
                    error.filename = os.fspath(args[0])
                raise

        return watching

    try:
        for call in genuine:
            setattr(os, call, watch(call))
        yield
    finally:
        for call, function in genuine.items():
            setattr(os, call, function)


def _path(call: str, args: tuple[Any, ...]) -> str:
    """The path that a call changes; "" for none."""
    if call == "open":
        return os.fspath(args[0]) if args[1] & (os.O_CREAT | os.O_TRUNC) else ""
    if call in _OF_PATHS:
        return os.fspath(args[1] if call == "rename" else args[0])
    try:
        if call == "close" and fcntl.fcntl(args[0], fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return ""
        return os.readlink(f"/proc/self/fd/{args[0]}").removesuffix(" (deleted)")
    except OSError:
        return ""


def _shortened(call: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if call not in ("write", "pwrite"):
        return args
    at = args[2] if call == "pwrite" else os.lseek(args[0], 0, os.SEEK_CUR)
    data = memoryview(args[1]).cast("B")
    if at > 0:
        return args
    half = data.nbytes // 2
    half -= half % (_PAGE if call == "pwrite" else 512)
    return (args[0], data[:half] if half else data, *args[2:])


class Fault:
    """For `watched`: after `skip` calls that match, `times` of them fail with `error` (errno); `path` is a pattern."""

    def __init__(self, call: str, path: str, error: int, *, skip: int = 0, times: int = 1) -> None:
        self.call, self.path, self.error, self.skip, self.times = call, path, error, skip, times
        self.struck = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        if operation.call == self.call and fnmatch.fnmatch(operation.path, self.path):
            self._strike()
        yield

    def _strike(self) -> None:
        with self._lock:
            if self.skip > 0:
                self.skip -= 1
            elif self.struck < self.times:
                self.struck += 1
                raise OSError(self.error, os.strerror(self.error))
