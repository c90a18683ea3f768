"""A small schema for parsed JSON, strict: each field there, of its type, within its bounds.

A *check* is a function that returns the value in the form wanted or raises Fault, which gathers on its way up where in
the document the value lies. `record`, `list_of` and `dict_of` make checks of checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from operator import itemgetter
from typing import Any, TypeVar

from mpi_ckpt.storage.records import MAX_AXES

T = TypeVar("T")
_MAX_INTEGER = 2**63 - 1
_CRC32C = re.compile(r"[0-9a-f]{8}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Fault(Exception):
    """A value that is not valid, and where it lies as far as that is known."""

    def __init__(self, found: object, expected: str, field: str = "") -> None:
        self.found, self.expected, self.field = found, expected, field

    def inside(self, outer: str) -> Fault:
        """The same fault, seen from one level further out."""
        separator = "." if self.field and not self.field.startswith("[") else ""
        self.field = f"{outer}{separator}{self.field}"
        return self


def record(make: Callable[..., T], checks: dict[str, Callable[[Any], Any]], **optional: Callable[[Any], Any]) -> Any:
    """A check for an object with the fields `checks` (two or more), and perhaps `optional` ones; calls `make(*fields)`.

    An optional field that is there is passed by name. Other fields are ignored.
    """
    names, inners, take = list(checks), list(checks.values()), itemgetter(*checks)

    def check(value: Any) -> T:
        found: list[Any] = []
        extra = {}
        mapping(value)
        try:
            for inner, item in zip(inners, take(value), strict=True):
                found.append(inner(item))
        except KeyError as error:
            raise Fault("nothing", "the field", str(error.args[0])) from None
        except Fault as fault:
            raise fault.inside(names[len(found)]) from None
        for name in optional.keys() & value.keys() if optional else ():
            try:
                extra[name] = optional[name](value[name])
            except Fault as fault:
                raise fault.inside(name) from None
        return make(*found, **extra)

    return check


def list_of(inner: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """A check for a list, each item checked by `inner`."""

    def check(value: Any) -> tuple[T, ...]:
        found: list[T] = []
        _checked(value, type(value) is list, "a list")
        try:
            for item in value:
                found.append(inner(item))
        except Fault as fault:
            raise fault.inside(f"[{len(found)}]") from None
        return tuple(found)

    return check


def dict_of(inner: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    """A check for an object of any keys, each value checked by `inner`."""

    def check(value: Any) -> dict[str, T]:
        found = {}
        for key, item in mapping(value).items():
            try:
                found[key] = inner(item)
            except Fault as fault:
                raise fault.inside(f"[{key!r}]") from None
        return found

    return check


def integer(value: Any) -> int:
    """From 0 to 2^63 - 1; a bool is none."""
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        raise Fault(_shown(value), "an integer from 0 to 2^63 - 1")
    return value


def integers(value: Any) -> tuple[int, ...]:
    """A list of integers, one an axis."""
    if type(value) is not list or len(value) > MAX_AXES:
        raise Fault(_shown(value), f"a list of at most {MAX_AXES} integers")
    return tuple(map(integer, value))


def string(value: Any) -> str:
    """A str."""
    return _checked(value, type(value) is str, "a string")


def boolean(value: Any) -> bool:
    """A bool."""
    return _checked(value, type(value) is bool, "true or false")


def mapping(value: Any) -> dict[str, Any]:
    """An object, unchecked inside."""
    return _checked(value, type(value) is dict, "an object")


def seconds(value: Any) -> float:
    """A finite, non-negative number."""
    ok = type(value) in (int, float) and 0 <= value < math.inf
    return float(_checked(value, ok, "a finite number of seconds from 0 on"))


def crc32c(value: Any) -> str:
    """Eight hexadecimal digits."""
    ok = type(value) is str and _CRC32C.fullmatch(value) is not None
    return _checked(value, ok, "eight lower-case hexadecimal digits")


def sha256(value: Any) -> str:
    """64 hexadecimal digits."""
    ok = type(value) is str and _SHA256.fullmatch(value) is not None
    return _checked(value, ok, "64 lower-case hexadecimal digits")


def _checked(value: Any, ok: bool, expected: str) -> Any:
    if not ok:
        raise Fault(_shown(value), expected)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
