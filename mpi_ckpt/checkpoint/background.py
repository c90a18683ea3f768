"""One piece of work at a time in a thread of its own, whose outcome is never lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs one function at a time beside the caller; its outcome waits for the next `collect`."""

    def __init__(self, name: str, nice: int = 0) -> None:
        """`nice` is added to the nice value of the thread, and of those that it starts."""
        if not 0 <= nice <= 19:
            raise ValueError(f"background_nice: found {nice!r}, expected an int from 0 to 19")
        self._name, self._nice = name, nice
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._then: Callable[[Callable[[], Any]], None] | None = None

    @property
    def busy(self) -> bool:
        """True while there is work whose outcome has not been collected."""
        return self._thread is not None

    @property
    def error(self) -> BaseException | None:
        """What the work has raised, until it is collected."""
        return self._error

    def start(self, work: Callable[[], Any], then: Callable[[Callable[[], Any]], None] | None = None) -> None:
        """**Local.** Begin `work`; the caller has collected the one before.

        `then` is called by `collect`, in the caller's thread, with a function that returns what `work` returned or
        raises what it raised; it is for what only that thread may do.
        """
        self._then = then
        # A daemon: a process whose peers are gone must be able to end although its thread still waits for them.
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._step_back()
            self._result = work()
        except BaseException as error:  # whatever it is, it is the caller's to know
            self._error = error

    def _step_back(self) -> None:
        """Lower the priority of this thread. On Linux it is a thread's own, and its children inherit it."""
        if self._nice:
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + self._nice))

    def finished(self) -> bool:
        """**Local.** Whether the work has ended (its outcome may still have to be collected)."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """**Local.** Wait at most `timeout` seconds; whether the work has ended. Raises nothing."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.finished()

    def collect(self) -> None:
        """Wait for the work and raise what it raised, once. **Collective** if the work's `then` is."""
        if self._thread is None:
            return
        self._thread.join()
        result, error, then = self._result, self._error, self._then
        self._thread = self._result = self._error = self._then = None

        def outcome() -> Any:
            if error is not None:
                raise error
            return result

        if then is not None:
            then(outcome)
        else:
            outcome()
