"""One piece of work at a time in a thread of its own, whose outcome is never lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs one function at a time beside the caller; its exception waits for the next `collect`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """True while there is work whose outcome has not been collected."""
        return self._thread is not None

    def start(self, work: Callable[[], object]) -> None:
        """**Local.** Begin `work`; the caller has collected the one before."""
        # A daemon: a process whose peers are gone must be able to end although its thread still waits for them.
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is, it is the caller's to know
            self._error = error

    def finished(self) -> bool:
        """**Local.** Whether the work has ended (its outcome may still have to be collected)."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """**Local.** Wait at most `timeout` seconds; whether the work has ended. Raises nothing."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self.finished()

    def collect(self) -> None:
        """**Local.** Wait for the work and raise what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
