"""`run.json`, by which a run is known: written by the trainer, carried beside the steps by whoever moves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

RUN_FILE = "run.json"


def identity(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a `run.json`, or the `meta` of a step, says of its run: settings, and the id that the run began with, if it
    is not older than ids are. Empty for a step of another program."""
    settings = about.get("settings")
    if not isinstance(settings, dict):
        return {}
    return {**settings, **{key: about[key] for key in ("run_id",) if about.get(key) is not None}}


class Difference(NamedTuple):
    """What two runs' identities say of the keys in which they differ, in words."""

    found: str
    expected: str


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Difference | None:
    """In what two runs' identities differ, if they do, of the keys that both have: a newer version may know more.

    Where the data lie is none of them. They may have moved; their content tells whether they are the same.
    """
    both = found.keys() & expected.keys() - {"data"}
    keys = sorted(key for key in both if not _agree(found[key], expected[key]))
    if not keys:
        return None
    return Difference(*(", ".join(f"{key} {values[key]}" for key in keys) for values in (found, expected)))


def same_run(one: bytes, other: bytes) -> bool:
    """Whether two copies of the file that can be read speak of one run, to whatever step it is to go."""
    first, second = read(one), read(other)
    if first is None or second is None:
        return False
    return not differing(identity(first), identity(second)) and _agree(first["data"], second["data"])


def read(data: bytes) -> dict[str, Any] | None:
    """What a copy of the file says; None where it is damaged."""
    try:
        document = json.loads(data)
    except ValueError:
        return None
    whole = isinstance(document, dict) and all(isinstance(document.get(key), dict) for key in ("settings", "data"))
    return document if whole else None


def _agree(one: Any, other: Any) -> bool:
    """Whether two values are the same, as far as dicts among them have the same keys."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_agree(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)
