"""The plain values, meta and metrics in which two steps differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import values
from mpi_ckpt.checkpoint.documents import read_document, read_per_rank
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.tools.finding import Finding

_SHOWN = 60  # characters of a value

Step = tuple[Path, ShardManifest]


def diff_values(a: Step, b: Step) -> Iterator[Finding]:
    """**Local.** Every difference in values, values per rank, meta and metrics; 1, 1.0 and True are three things.

    Raises MissingShard, CorruptShard.
    """
    one, other = (read_document(*step, 0) for step in (a, b))
    yield from _diff("value", one["replicated"], other["replicated"], encoded=True)
    mine, theirs = read_per_rank(*a, one), read_per_rank(*b, other)
    keys = {key for documents in (mine, theirs) for document in documents for key in document}
    if len(mine) == len(theirs):
        for rank, pair in enumerate(zip(mine, theirs, strict=True)):
            named = ({f"{key} of rank {rank}": value for key, value in document.items()} for document in pair)
            yield from _diff("value", *named, encoded=True)
    else:
        for key in sorted(keys):
            here, there = (sum(key in document for document in each) for each in (mine, theirs))
            yield Finding("value", key, f"values of {here} ranks", f"values of {there} ranks")
    yield from _diff("meta", a[1].meta, b[1].meta)
    yield from _diff("metric", a[1].metrics, b[1].metrics)


def _diff(kind: str, a: Mapping[str, Any], b: Mapping[str, Any], *, encoded: bool = False) -> Iterator[Finding]:
    for key in sorted(a.keys() | b.keys()):
        texts = [_canonical(each[key]) if key in each else None for each in (a, b)]
        if texts[0] != texts[1]:
            here, there = (_shown(each[key], encoded) if key in each else "nothing" for each in (a, b))
            yield Finding(kind, key, here, there)


def _canonical(value: Any) -> str:
    """Equal for equal values of equal types, whatever the order of a dict's keys."""
    return json.dumps(value, sort_keys=True)


def _shown(value: Any, encoded: bool) -> str:
    try:
        text = repr(values.decode(value) if encoded else value)
    except (ValueError, KeyError, TypeError):  # a kind of value that this version does not know
        text = _canonical(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
