"""What an application may pass beside its state: checked when it is passed, not when the background meets it."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping
from typing import Any

from mpi_ckpt.errors import LayoutMismatch, UnsupportedState
from mpi_ckpt.storage.manifest_layout import check_index
from mpi_ckpt.storage.records import ArrayRecord, IndexRecord

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}

Index = dict[str, tuple[int, tuple[int, ...]]]


def check_step(step: int) -> int:
    """**Local.** The step, or ValueError."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: found {step!r}, expected an int of 0 or more")
    return step


def parse_bytes(name: str, text: str) -> int:
    """Bytes in '50MB' (10^6), '1GiB' (2^30) or '5000000'. Raises ValueError naming the option, found and expected."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = int(float(match[1]) * unit) if match and unit else 0
    if nbytes < 1:
        raise ValueError(f"{name}: found {text!r}, expected bytes such as 500KB, 50MB or 1GiB")
    return nbytes


def check_of_use(place: str, given: object, **options: object) -> None:
    """**Local.** Raise ValueError for an option that was given for a tier, `place`, that was not."""
    for name, value in options.items():
        if value is not None and given is None:
            raise ValueError(f"{name}: found {value!r} without `{place}`, which it is about; expected both, or neither")


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
