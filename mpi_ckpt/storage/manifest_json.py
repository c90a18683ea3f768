"""A manifest as text: strict JSON that carries its own digest, one line for each top-level key, array and shard.

The digest is the sha256 of the *canonical* JSON (keys sorted, no white space, UTF-8) of everything but itself. The text
is the canonical JSON with line breaks between entries and the digest as last key, so that its digest needs no second
serialisation; a text that was formatted otherwise since is brought to canonical form first.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mpi_ckpt.errors import InvalidManifest, UnsupportedState

_DIGEST = "manifest_sha256"
_ENTRIES_ON_LINES = ("arrays", "index")
_ACTION = "Restore another step, or bring the manifest back from a copy; do not edit it."

canonical = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


def dump(document: dict[str, Any], lines: Mapping[str, Iterable[str]]) -> str:
    """The text of a document without its digest; `lines` has more of its keys, each a list of canonical JSON already.

    Raises UnsupportedState where JSON cannot hold the document as it is.
    """
    try:
        pieces = ["{", *_pieces(document, lines), "}"]
        digest = _sha256(pieces)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedState(
            "the manifest cannot be written as strict JSON",
            found=f"{type(error).__name__}: {error}",
            expected="dicts with str keys, lists, str, int, finite float, bool and None",
            action="Look at `meta` and `index`; put other types into the state, which keeps them.",
        ) from error
    pieces[-2:] = [f"{pieces[-2]},", f'"{_DIGEST}":"{digest}"', "}", ""]
    return "\n".join(pieces)


def load(text: str, path: object = None) -> dict[str, Any]:
    """The document, its digest checked and removed. Raises InvalidManifest for anything but what was written."""
    try:
        document = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        raise _invalid("the manifest is not strict JSON", path, error, "a JSON object, each key once") from error
    if not isinstance(document, dict):
        raise _invalid("the manifest is not a JSON object", path, type(document).__name__, "an object")
    claimed = document.pop(_DIGEST, None)
    found = _digest_of(text, document, claimed)
    if claimed != found:
        what = f"the manifest is not what was written (field {_DIGEST})"
        raise _invalid(what, path, f"a document of sha256 {found}", claimed or f"the field {_DIGEST}")
    return document


def _pieces(document: dict[str, Any], lines: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """The canonical JSON between the outer braces, in pieces that end where a person likes a line to end."""
    keys = sorted(document.keys() | lines.keys())
    for key in keys:
        comma = "" if key == keys[-1] else ","
        if key in lines:
            yield from _on_lines(key, "[", lines[key], "]" + comma)
        elif key in _ENTRIES_ON_LINES:
            value = document[key]
            yield from _on_lines(
                key, "{", [f"{canonical(k)}:{canonical(value[k])}" for k in sorted(value)], "}" + comma
            )
        else:
            yield f"{canonical(key)}:{canonical(document[key])}{comma}"


def _on_lines(key: str, opening: str, entries: Iterable[str], closing: str) -> Iterator[str]:
    line = f"{canonical(key)}:{opening}"
    comma = ""
    for entry in entries:
        yield line + comma
        line, comma = entry, ","
    yield line
    yield closing


def _digest_of(text: str, document: dict[str, Any], claimed: object) -> str | None:
    """The digest of the document that `text` was parsed into; None where it has no canonical form."""
    # A line break is never part of a JSON string: the lines, put together, still mean the same.
    *lines, last, digest, brace, end = ["", "", "", *text.split("\n")]
    try:
        if [last[-1:], digest, brace, end] == [",", f'"{_DIGEST}":"{claimed}"', "}", ""]:
            found = _sha256([*lines, last[:-1], "}"])
            if found == claimed:
                return found
        return _sha256([canonical(document)])
    except ValueError:  # a lone surrogate
        return None


def _sha256(pieces: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece.encode())
    return digest.hexdigest()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the constant {name}")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits}, which no float can hold")
    return value


def _invalid(what: str, path: object, found: object, expected: object) -> InvalidManifest:
    return InvalidManifest(what, path=path, found=found, expected=expected, action=_ACTION)
