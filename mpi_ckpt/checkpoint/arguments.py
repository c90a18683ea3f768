"""What an application may pass beside its state: checked when it is passed, not when the background meets it."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from typing import Any

from mpi_ckpt.errors import LayoutMismatch, UnsupportedState
from mpi_ckpt.storage.manifest_layout import check_index
from mpi_ckpt.storage.records import ArrayRecord, IndexRecord

Index = dict[str, tuple[int, tuple[int, ...]]]


def check_step(step: int) -> int:
    """**Local.** The step, or ValueError."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: found {step!r}, expected an int of 0 or more")
    return step


def check_json(about: dict[str, Any]) -> None:
    """**Local.** Raise UnsupportedState unless `about` comes back from JSON as it is."""
    try:
        same = json.loads(json.dumps(about, allow_nan=False)) == about
    except (TypeError, ValueError) as error:
        raise UnsupportedState(f"`meta` or `metrics` is not plain JSON: {error}", found=repr(about)[:200]) from error
    if not same:
        raise UnsupportedState(
            "`meta` or `metrics` would not come back from JSON as it is",
            found=repr(about)[:200],
            expected="dicts with str keys, lists, str, int, float, bool and None",
            action="Put other types into the state, which keeps them.",
        )


def plain_index(index: Mapping[str, Any], arrays: Mapping[str, ArrayRecord]) -> Index:
    """**Local.** The index in Python's own ints. LayoutMismatch for an entry that is no interval of the flat space."""
    plain: Index = {}
    for name, entry in index.items():
        try:
            start, shape = entry
            plain[name] = operator.index(start), tuple(map(operator.index, shape))
        except (TypeError, ValueError):
            raise LayoutMismatch(
                f"the index entry {name!r} is not what an index holds",
                found=repr(entry)[:200],
                expected="(first element, shape): an int and a tuple of ints",
                action="Check `index`: (first element, shape) of every named parameter.",
            ) from None
    check_index(arrays, {name: IndexRecord(start, shape) for name, (start, shape) in plain.items()})
    return plain
