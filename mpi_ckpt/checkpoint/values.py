"""Plain Python values as strict JSON bytes that bring back the same types and the same bits.

JSON's own types stay themselves. Everything else is a tagged object `{"$": kind, "v": ...}`: ints that a double cannot
hold, NaN and infinities, text that is no UTF-8, bytes, tuples, dicts that are not plain JSON objects, NumPy scalars and
arrays, and the states of random generators. What is not listed here is refused when it is saved: a value that came back
as something else would be noticed weeks later.
"""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_ckpt.errors import LayoutMismatch, UnsupportedState

_EXACT_IN_DOUBLE = 2**53  # other readers of JSON hold numbers as doubles
_MAX_DEPTH = 100  # a restore, perhaps from deep in its program's stack, must be able to follow

Generator = (np.random.Generator, np.random.RandomState, random.Random)  # the kinds whose state can be saved


def encode(key: str, value: Any) -> Any:
    """**Local.** The JSON-ready form of a plain value or a generator. Raises UnsupportedState naming `key` and type."""
    if isinstance(value, Generator) and not isinstance(value, random.SystemRandom):  # that one has no state
        value = SavedGenerator.of(value)
    _check_depth(key, value)
    return _encode(key, value)


def _encode(key: str, value: Any) -> Any:
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(key, value)
    if isinstance(value, np.generic):
        return _encode_array(key, np.asarray(value), "scalar")
    raise UnsupportedState(
        f"the value at {key!r} cannot be saved exactly",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
        expected="None, bool, int, float, complex, str, bytes, list, tuple, dict, set, a NumPy scalar or array: "
        "exactly these types, at any depth",
        action="Convert it before saving, or leave it out of the state. Give a generator its own key in a dict.",
    )


def _check_depth(key: str, value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (item for outer in level for item in _contents(outer) if type(item) in _CONTAINERS)
        level = list({id(item): item for item in inner}.values())  # once each: a knot would double them at every level
        if not level:
            return
    raise UnsupportedState(
        f"the value at {key!r} is nested too deeply",
        found=f"more than {_MAX_DEPTH} levels, or a container that holds itself",
        expected=f"at most {_MAX_DEPTH} levels",
        action="Flatten it, or break the cycle.",
    )


def _contents(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return (*value, *value.values())
    return value if type(value) in _CONTAINERS else ()


def decode(value: Any) -> Any:
    """**Local.** The inverse of `encode`; a generator comes back as a SavedGenerator. ValueError for an unknown tag."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {name: decode(item) for name, item in value.items()}
    decoder = _DECODERS.get(value["$"])
    if decoder is None:
        raise ValueError(f"unknown kind of value {value['$']!r}")
    return decoder(value["v"])


def dumps(document: Any) -> bytes:
    """**Local.** Strict, deterministic JSON of an already encoded document, as UTF-8."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def loads(data: bytes | memoryview) -> Any:
    """**Local.** The still encoded document. Raises ValueError when it is not JSON."""
    return json.loads(bytes(data).decode())


# -- random generators -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedGenerator:
    """The complete state of a random generator: its class, its algorithm where the class has several, and its words."""

    kind: str
    algorithm: str
    state: Any

    @classmethod
    def of(cls, generator: Any) -> SavedGenerator:
        """**Local.** The present state of a generator of one of the kinds in `Generator`."""
        if isinstance(generator, np.random.Generator):
            state = generator.bit_generator.state
            return cls("numpy.random.Generator", state["bit_generator"], state)
        if isinstance(generator, np.random.RandomState):
            state = generator.get_state(legacy=False)
            return cls("numpy.random.RandomState", str(state["bit_generator"]), state)
        return cls("random.Random", "MT19937", generator.getstate())

    def check_fits(self, key: str, generator: Any) -> None:
        """**Local.** Raise LayoutMismatch unless `generator` is of the kind that was saved."""
        mine = SavedGenerator.of(generator)
        if (mine.kind, mine.algorithm) != (self.kind, self.algorithm):
            raise LayoutMismatch(
                f"the random generator at {key!r} is of another kind than the saved one",
                found=f"{self.kind} on {self.algorithm} in the checkpoint",
                expected=f"{mine.kind} on {mine.algorithm}, as in the state",
                action="Build the same kind of generator before restoring.",
            )

    def put_into(self, generator: Any) -> None:
        """**Local.** Set a generator that fits to this state."""
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = self.state
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(self.state)
        else:
            generator.setstate(self.state)

    def build(self) -> Any:
        """**Local.** A new generator in this state."""
        if self.kind == "random.Random":
            generator: Any = random.Random()
        else:
            bits = getattr(np.random, self.algorithm)()
            generator = np.random.Generator(bits) if self.kind.endswith("Generator") else np.random.RandomState(bits)
        self.put_into(generator)
        return generator


def _encode_generator(key: str, value: SavedGenerator) -> Any:
    return _tagged("generator", [value.kind, value.algorithm, _encode(key, value.state)])


# -- one encoder a type ----------------------------------------------------------------------------------------------


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {"$": kind, "v": value}


def _encode_int(key: str, value: int) -> Any:
    return value if abs(value) <= _EXACT_IN_DOUBLE else _tagged("int", hex(value))


def _encode_float(key: str, value: float) -> Any:
    if math.isfinite(value):
        return value
    return _tagged("float", repr(value) if math.isinf(value) else struct.pack(">d", value).hex())  # NaNs differ


def _decode_float(value: str) -> float:
    return struct.unpack(">d", bytes.fromhex(value))[0] if len(value) == 16 else float(value)


def _is_utf8(text: str) -> bool:
    """False for lone surrogates, of which JSON would make a pair where two of them meet."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _encode_str(key: str, value: str) -> Any:
    return value if _is_utf8(value) else _tagged("str", base64.b64encode(value.encode(errors="surrogatepass")).decode())


def _encode_dict(key: str, value: dict[Any, Any]) -> Any:
    if all(type(name) is str and name != "$" and _is_utf8(name) for name in value):
        return {name: _encode(f"{key}/{name}", item) for name, item in value.items()}
    return _tagged("dict", [[_encode(key, name), _encode(key, item)] for name, item in value.items()])


def _encode_set(kind: str) -> Callable[[str, Any], Any]:
    # The order of a set differs from process to process: sort by the encoded text, so that equal sets give equal bytes.
    return lambda key, value: _tagged(kind, sorted((_encode(key, item) for item in value), key=json.dumps))


def _encode_array(key: str, array: np.ndarray, kind: str = "array") -> Any:
    if array.dtype.kind not in "biufc" or array.dtype.char in "gG":
        raise UnsupportedState(
            f"the array at {key!r} has a dtype that cannot be saved exactly",
            found=array.dtype,
            expected="bool, integers, floats of 2, 4 or 8 bytes, complex of 8 or 16 bytes",
            action="Convert the array before saving.",
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return _tagged(kind, {"dtype": array.dtype.str, "shape": list(array.shape), "data": data})


def _decode_array(value: dict[str, Any]) -> np.ndarray:
    data = base64.b64decode(value["data"], validate=True)
    return np.frombuffer(bytearray(data), dtype=value["dtype"]).reshape(value["shape"])


_ENCODERS: dict[type, Callable[[str, Any], Any]] = {
    type(None): lambda key, value: value,
    bool: lambda key, value: value,
    str: _encode_str,
    int: _encode_int,
    float: _encode_float,
    complex: lambda key, value: _tagged("complex", [_encode_float(key, value.real), _encode_float(key, value.imag)]),
    bytes: lambda key, value: _tagged("bytes", base64.b64encode(value).decode()),
    bytearray: lambda key, value: _tagged("bytearray", base64.b64encode(value).decode()),
    list: lambda key, value: [_encode(key, item) for item in value],
    tuple: lambda key, value: _tagged("tuple", [_encode(key, item) for item in value]),
    dict: _encode_dict,
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    np.ndarray: _encode_array,
    SavedGenerator: _encode_generator,
}

_CONTAINERS = (list, tuple, dict, set, frozenset)

_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16),
    "float": _decode_float,
    "str": lambda v: base64.b64decode(v, validate=True).decode(errors="surrogatepass"),
    "complex": lambda v: complex(decode(v[0]), decode(v[1])),
    "bytes": lambda v: base64.b64decode(v, validate=True),
    "bytearray": lambda v: bytearray(base64.b64decode(v, validate=True)),
    "tuple": lambda v: tuple(decode(item) for item in v),
    "dict": lambda v: {decode(name): decode(item) for name, item in v},
    "set": lambda v: {decode(item) for item in v},
    "frozenset": lambda v: frozenset(decode(item) for item in v),
    "array": _decode_array,
    "scalar": lambda v: _decode_array(v)[()],
    "generator": lambda v: SavedGenerator(v[0], v[1], decode(v[2])),
}
