"""What several tests under MPI need: the same error on all ranks, and the contents of a directory."""

from __future__ import annotations

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


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root`, by its relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
