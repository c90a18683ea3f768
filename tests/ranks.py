"""What several tests under MPI need: the same error on all ranks, notes of each other, contents of a directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpi_ckpt.errors import ExplainedError


def same_everywhere(comm, value: Any) -> Any:
    """**Collective.** `value`, which must be equal on all ranks."""
    values = comm.allgather(value)
    assert values == [value] * comm.size
    return value


def error_of(comm, kind: type[ExplainedError], run: Callable[[], object]) -> ExplainedError:
    """**Collective.** What `run()` raises, the same on all ranks: type, text and attributes."""
    with pytest.raises(kind) as caught:
        run()
    same_everywhere(comm, (type(caught.value).__name__, str(caught.value), vars(caught.value)))
    return caught.value


def notes_in(directory: Path) -> Path:
    """A directory for `await_notes`."""
    directory.mkdir(exist_ok=True)
    return directory


def await_notes(directory: Path, many: int) -> None:
    """Until there are that many files in `directory`: how a rank waits for others that must not hear from it."""
    while len(os.listdir(directory)) < many:
        time.sleep(0.01)


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
