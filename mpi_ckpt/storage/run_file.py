"""`run.json`, by which a run is known: written by the trainer, carried beside the steps by whoever moves them."""

from __future__ import annotations

import json
from typing import Any

RUN_FILE = "run.json"


def same_run(one: bytes, other: bytes) -> bool:
    """Whether two copies of the file speak of one run: of the same settings and data, to whatever step it is to go."""
    try:
        first, second = json.loads(one), json.loads(other)
        return not differing(first["settings"], second["settings"]) and _agree(first["data"], second["data"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The settings in which two runs differ, of those that both have: a newer version may know more.

    Where the data lie is none of them. They may have moved; their content tells whether they are the same.
    """
    both = one.keys() & other.keys() - {"data"}
    return sorted(key for key in both if not _agree(one[key], other[key]))


def _agree(one: Any, other: Any) -> bool:
    """Whether two values are the same, as far as dicts among them have the same keys."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_agree(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)
