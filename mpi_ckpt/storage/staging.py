"""Constant memory between arrays and files: a few page-aligned buffers and the threads that work on them.

A stream is cut into pieces of SLOT_BYTES. A piece lies in one slot; jobs on it (hash it, write it) run in lanes, and
the slot is used again when all of them are done. Threads of a lane run its jobs in order, so a digest may be one.
The buffers stay after use for the next stream: the first touch of memory costs ten times a copy into it.

Bytes that lie in the caller's own memory as the file has them, and begin on a page, need no slot: disks reach them
there, in pieces of IN_PLACE_BYTES. That saves a copy, and threads that wake up less often.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

SLOT_BYTES = 2 << 20
SLOTS = 6  # 12 MiB a stream
IN_PLACE_BYTES = 8 << 20


class Lane:
    """One thread, started when the first job comes, that runs jobs in the order given.

    Not an executor of concurrent.futures: those refuse work once the main thread has ended, and a save in the
    background has to finish then. A daemon, so that a lane which an interrupt left behind cannot keep a process alive.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `work(*args)` after what was submitted before; the future has its result or exception."""
        if not self._thread.is_alive():
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, work, args))
        return future

    def end(self) -> None:
        """Let the thread end after what was submitted."""
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for that."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work, args = job
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)
            del future, job, work, args  # keep no buffer alive while waiting


@dataclass
class Slot:
    """One page-aligned buffer, uint8 [SLOT_BYTES], or a piece in place, and the jobs that still use it."""

    buffer: np.ndarray
    jobs: list[Future[Any]] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until nothing uses the buffer; raises what a job raised."""
        while self.jobs:
            self.jobs.pop(0).result()


_spare: list[mmap.mmap] = []  # at most one set of buffers waits here; list operations are atomic


@contextlib.contextmanager
def staging(*names: str) -> Iterator[tuple[list[Slot], list[Lane]]]:
    """Slots, and a lane for each of `names`. When it is left, by an exception too, no thread of it is alive."""
    memory = _take_memory()
    pages = np.frombuffer(memory, np.uint8)
    slots = [Slot(pages[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(SLOTS)]
    lanes = [Lane(f"mpi_ckpt {name}") for name in names]
    try:
        yield slots, lanes
    finally:
        for lane in lanes:
            lane.end()
        for lane in lanes:
            lane.join()
        if not _spare:  # reached only when no lane can touch the buffers any more
            _spare.append(memory)


def _take_memory() -> mmap.mmap:
    try:
        return _spare.pop()
    except IndexError:
        # Private: a forked child must not write into the buffers of its parent.
        memory = mmap.mmap(-1, SLOTS * SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a wish: fewer page faults, cheaper direct I/O
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
