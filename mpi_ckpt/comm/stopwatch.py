"""How long something took, added up."""

from __future__ import annotations

import time
from types import TracebackType


class Stopwatch:
    """**Local.** `with watch:` adds the time inside to `watch.seconds`. Not to be nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += time.perf_counter() - self._began
