"""Reads and writes that go past the page cache where the file system takes it (O_DIRECT), and through it elsewhere.

Descriptors opened here want offsets, lengths and addresses that are multiples of ALIGN. Where a file system refuses
O_DIRECT, at open or at the first transfer (EINVAL: tmpfs, some NFS), the same descriptor goes on without it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpi_ckpt.storage import atomic

logger = logging.getLogger(__name__)

ALIGN = 4096
SLOW_DISK = 10e6  # bytes a second that even a bad day's disk reaches: stretches timeouts for large files
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def align_up(n: int) -> int:
    """The next multiple of ALIGN."""
    return -(-n // ALIGN) * ALIGN


def align_down(n: int) -> int:
    """The last multiple of ALIGN that is not above."""
    return n // ALIGN * ALIGN


@contextlib.contextmanager
def opened(path: Path, flags: int, *, cached: bool = False) -> Iterator[int]:
    """A descriptor of `path`, past the page cache if that is possible, or `cached` (then at any offset).

    OSErrors from inside, close included, name `path`.
    """
    with atomic.naming(path):
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with atomic.closing(fd):
            if not cached:
                _switch_on(fd)
            yield fd


def _switch_on(fd: int) -> None:
    """O_DIRECT, where the file system has it. At open() a refusal would come after the file was made."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _say_buffered()


def write_all(fd: int, data: np.ndarray, offset: int) -> None:
    """Write all of `data` (uint8) at `offset`; a short write is continued."""
    rest = data.data
    while rest:
        n = _transfer(os.pwrite, fd, rest, offset)
        rest, offset = rest[n:], offset + n


def read_into(fd: int, buffer: np.ndarray, offset: int, nbytes: int) -> int:
    """Read `nbytes` from `offset` into `buffer` (uint8, of at least align_up(nbytes)); fewer only at the file's end.

    Returns the number of bytes that are there, at most `nbytes`.
    """
    done = 0
    while done < nbytes:
        n = _transfer(os.preadv, fd, [buffer[done : align_up(nbytes)].data], offset + done)
        if n == 0:
            break
        done += n
    return min(done, nbytes)


def _transfer(call: Callable[..., int], fd: int, data: Any, offset: int) -> int:
    """Call, and once more without O_DIRECT if that may have been the reason for EINVAL."""
    # Looked at before the call: several threads share the descriptor, and another one may switch it off meanwhile.
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        return call(fd, data, offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not flags & _O_DIRECT:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
    _say_buffered()
    return call(fd, data, offset)


@functools.cache
def _say_buffered() -> None:
    logger.info("the file system refuses O_DIRECT; going through the page cache")
