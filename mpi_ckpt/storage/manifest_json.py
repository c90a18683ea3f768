"""A manifest as text: strict JSON that carries its own digest, one line for each top-level key, array and shard.

The digest is the sha256 of the *canonical* JSON (keys sorted, no white space, UTF-8) of everything but itself. The text
is the canonical JSON with line breaks between entries and the digest as last key, so that its digest needs no second
serialisation; a text that was formatted otherwise since is brought to canonical form first.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from mpi_ckpt.errors import InvalidManifest, UnsupportedState

_DIGEST = "manifest_sha256"
_ENTRIES_ON_LINES = ("arrays", "index", "shards")
_ACTION = "Restore another step, or bring the manifest back from a copy; do not edit it."

_canonical = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


def dump(document: dict[str, Any]) -> str:
    """The text of a document without its digest. Raises UnsupportedState where JSON cannot hold it as it is."""
    try:
        body = ",\n".join(f"{_canonical(key)}:{_value(key, document[key])}" for key in sorted(document))
        digest = _sha256(f"{{{body}}}".replace("\n", ""))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedState(
            "the manifest cannot be written as strict JSON",
            found=f"{type(error).__name__}: {error}",
            expected="dicts with str keys, lists, str, int, finite float, bool and None",
            action="Look at `meta` and `index`; put other types into the state, which keeps them.",
        ) from error
    return f'{{\n{body},\n"{_DIGEST}":"{digest}"\n}}\n'


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


def _value(key: str, value: Any) -> str:
    if key not in _ENTRIES_ON_LINES or not value:
        return _canonical(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(map(_canonical, value)) + "\n]"
    return "{\n" + ",\n".join(f"{_canonical(k)}:{_canonical(value[k])}" for k in sorted(value)) + "\n}"


def _digest_of(text: str, document: dict[str, Any], claimed: object) -> str | None:
    """The digest of the document that `text` was parsed into; None where it has no canonical form."""
    # Line breaks are never part of a JSON string, so without them the text still means the same.
    body = text.replace("\n", "").removesuffix(f',"{_DIGEST}":"{claimed}"}}') + "}"
    try:
        found = _sha256(body)
        return found if found == claimed else _sha256(_canonical(document))
    except ValueError:  # a lone surrogate
        return None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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
