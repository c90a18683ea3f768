"""Conversations with a remote store that are slowed down to a rate, and left behind when there is no time any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mpi_ckpt.checkpoint.background import Background
from mpi_ckpt.errors import RemoteFailed

T = TypeVar("T")

_GRACE = 2.0  # seconds that a request under way is waited for at the end
_LOOK = 0.2  # seconds between two looks whether the end has come


class Transfer:
    """`rate` bytes a second go by at most (None: any number), until `stop` is called."""

    def __init__(self, rate: float | None, nice: int) -> None:
        self._rate, self._nice = rate, nice
        self._stopped = threading.Event()
        self._due = 0.0

    @property
    def stopped(self) -> bool:
        """Whether the end has come."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """**Local.** End what is under way, and let nothing begin any more."""
        self._stopped.set()

    def pause(self, seconds: float) -> None:
        """**Local.** Sleep; not past the end."""
        self._stopped.wait(seconds)

    def pace(self, nbytes: int) -> None:
        """**Local.** Wait until `nbytes` more may go. Raises RemoteFailed at the end."""
        if self._rate is not None:
            now = time.monotonic()
            self._due = max(self._due, now) + nbytes / self._rate
            self.pause(self._due - now)
        if self.stopped:
            raise _ended()

    def run(self, work: Callable[[], T]) -> T:
        """**Local.** `work()` in a thread of its own, which is left behind at the end: the caller owes others its vote.

        Raises RemoteFailed then.
        """
        results: list[T] = []
        talk = Background("mpi_ckpt transfer", self._nice)
        talk.start(lambda: results.append(work()))
        while not talk.wait(_LOOK):
            if self.stopped and not talk.wait(_GRACE):
                raise _ended()
        talk.collect()
        return results[0]


def _ended() -> RemoteFailed:
    return RemoteFailed(
        "the launch ended before the upload did",
        found="no time left (upload_timeout), or an exception",
        expected="an upload that ends in time",
        action="The next launch goes on with it; or `python -m mpi_ckpt push`.",
    )
