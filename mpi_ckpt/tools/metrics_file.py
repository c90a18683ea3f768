"""`metrics.jsonl`, read while a run appends to it: whole lines only, each once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"

_PIECE_BYTES = 16 << 20  # read at once: the memory of a long run's log stays small
_ANCHOR_BYTES = 256  # of the last line read, looked at again: a file that was replaced differs in it (its time)

Line = dict[str, Any]


class MetricsFile:
    """The lines of one file, as they come. A file that is not there yet has none.

    A line without its newline is not there yet either: it is being written, or a crash has cut it short.
    """

    def __init__(self, path: Path) -> None:
        """**Local.** Reads nothing yet."""
        self.path = path
        self.unreadable = 0  # whole lines that are no JSON object
        self._inode: tuple[int, int] | None = None
        self._offset = 0
        self._anchor = b""

    def poll(self) -> tuple[list[Line], bool]:
        """**Local.** The next lines, none when all are read; and whether they are of another file than those before.

        The file was replaced, truncated or removed then, and what it said before does not count. Raises OSError for one
        that cannot be read.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [], self._forget()
        try:
            status = os.fstat(descriptor)
            anew = False
            if not self._continues(descriptor, (status.st_dev, status.st_ino)):
                anew = self._forget()
            self._inode = (status.st_dev, status.st_ino)
            piece = os.pread(descriptor, _PIECE_BYTES, self._offset)
        finally:
            os.close(descriptor)
        whole = piece[: piece.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._anchor = (self._anchor + whole)[-_ANCHOR_BYTES:]
        return self._parse(whole), anew

    def _continues(self, descriptor: int, inode: tuple[int, int]) -> bool:
        before = os.pread(descriptor, len(self._anchor), self._offset - len(self._anchor))
        return inode == self._inode and before == self._anchor

    def _forget(self) -> bool:
        """Begin anew; whether anything had been read."""
        anything = self._offset > 0
        self._inode, self._offset, self._anchor, self.unreadable = None, 0, b"", 0
        return anything

    def _parse(self, whole: bytes) -> list[Line]:
        lines = []
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # UnicodeDecodeError is one
                line = None
            if isinstance(line, dict):
                lines.append(line)
            else:
                self.unreadable += 1
        return lines


def number(line: Line, name: str) -> float:
    """A field of a line as a float; NaN where it is missing, null, or no number."""
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def step_of(line: Line) -> int | None:
    """The step of a line, None where it has none that can be one."""
    value = line.get("step")
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18 else None


def details(line: Line) -> str:
    """An event's own fields in words; a launch's settings are too many."""
    known = {"event", "step", "time", "settings"}
    return ", ".join(f"{name.replace('_', ' ')} {words(value)}" for name, value in line.items() if name not in known)


def words(value: Any) -> str:
    """A JSON value, short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} values"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
