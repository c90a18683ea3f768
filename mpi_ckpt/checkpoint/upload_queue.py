"""Which steps wait for their upload, and which of them are given up when too many do. Rank 0's; no messages."""

from __future__ import annotations

import threading


class UploadQueue:
    """Steps in the order of their saves; one at a time is on its way. Methods may be called by any thread.

    At most `limit` steps wait (None: any number), beside the one on its way: the oldest is given up then.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._waiting: list[int] = []
        self._on_its_way: int | None = None
        self._given_up: list[int] = []
        self._mutex = threading.Lock()

    @property
    def steps(self) -> frozenset[int]:
        """All that are not uploaded yet, the one on its way included."""
        with self._mutex:
            return frozenset(self._waiting if self._on_its_way is None else [*self._waiting, self._on_its_way])

    def add(self, *steps: int) -> None:
        """Let steps wait; one that is on its way at this moment, and was saved again, once more."""
        with self._mutex:
            self._waiting = [step for step in self._waiting if step not in steps] + [*steps]
            self._give_up()

    def add_before(self, *steps: int) -> None:
        """Let steps of an earlier launch wait before the others; not those that wait, or are on their way, already."""
        with self._mutex:
            known = {*self._waiting, self._on_its_way}
            self._waiting[:0] = [step for step in steps if step not in known]
            self._give_up()

    def _give_up(self) -> None:
        if self._limit is not None and len(self._waiting) > self._limit:
            self._given_up += self._waiting[: -self._limit]
            del self._waiting[: -self._limit]

    def take(self, but: frozenset[int] = frozenset()) -> int | None:
        """The oldest that waits and is not in `but`, on its way from now on."""
        with self._mutex:
            self._on_its_way = next((step for step in self._waiting if step not in but), None)
            if self._on_its_way is not None:
                self._waiting.remove(self._on_its_way)
            return self._on_its_way

    def done(self) -> None:
        """The step on its way has arrived, or is of no interest any more."""
        with self._mutex:
            self._on_its_way = None

    def put_back(self) -> None:
        """The step on its way did not arrive: it waits again, before the others."""
        with self._mutex:
            if self._on_its_way is not None and self._on_its_way not in self._waiting:
                self._waiting.insert(0, self._on_its_way)
            self._on_its_way = None

    def forget_after(self, step: int) -> None:
        """Let no step after `step` wait."""
        with self._mutex:
            self._waiting = [s for s in self._waiting if s <= step]

    def take_given_up(self) -> list[int]:
        """The steps given up since the last call."""
        with self._mutex:
            found, self._given_up = self._given_up, []
            return found
