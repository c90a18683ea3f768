"""Sums of byte strings over GF(2^8), in place and without a copy: the arithmetic of copies, parity and their reverse.

Sums whose factors are all 1 are XOR, which NumPy does at the speed of memory. For others ISA-L is called, if it is
there: as `libisal.so.2` of the system (Debian's libisal2, most distributions' isa-l), or as the copy that the wheel of
pyeclib brings. Without it tables in NumPy give the same bytes, at a fiftieth of the speed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpi_ckpt.redundancy.galois import products

logger = logging.getLogger(__name__)

BLOCK = 256 << 10  # bytes of each operand at a time: they stay in the cache


def combine(out: np.ndarray, factors: Sequence[int], inputs: Sequence[np.ndarray]) -> None:
    """**Local.** out = the sum of factors[i] * inputs[i]. All are contiguous uint8; the GIL is released.

    An input may be shorter than `out`: zeros follow it. `out` is none of the inputs. It is all zeros without inputs.
    """
    terms = [(f, data) for f, data in zip(factors, inputs, strict=True) if f and data.size]
    start = 0
    for end in sorted({out.size, *(data.size for _, data in terms)}):  # one interval, where all are equally long
        active = [(f, data[start:end]) for f, data in terms if data.size >= end]
        _combine_equal(out[start:end], [f for f, _ in active], [data for _, data in active])
        start = end


def _combine_equal(out: np.ndarray, factors: list[int], inputs: list[np.ndarray]) -> None:
    if not inputs:
        out.fill(0)
    elif factors == [1] * len(inputs):
        _xor(out, inputs)
    elif (isal := library()) is not None:
        _combine_by_library(isal, out, factors, inputs)
    else:
        combine_by_tables(out, factors, inputs)


def _xor(out: np.ndarray, inputs: list[np.ndarray]) -> None:
    words = out.size // 8 * 8
    for lo in range(0, words, BLOCK):
        hi = min(lo + BLOCK, words)
        _xor_block(out[lo:hi].view(np.uint64), [data[lo:hi].view(np.uint64) for data in inputs])
    if words < out.size:
        _xor_block(out[words:], [data[words:] for data in inputs])


def _xor_block(out: np.ndarray, inputs: list[np.ndarray]) -> None:
    if len(inputs) == 1:
        np.copyto(out, inputs[0])
        return
    np.bitwise_xor(inputs[0], inputs[1], out=out)
    for data in inputs[2:]:
        np.bitwise_xor(out, data, out=out)


def combine_by_tables(out: np.ndarray, factors: Sequence[int], inputs: Sequence[np.ndarray]) -> None:
    """**Local.** `combine` for inputs as long as `out`, without any library: what ISA-L is held against."""
    scratch = np.empty(min(out.size, BLOCK), np.uint8)
    out.fill(0)
    for lo in range(0, out.size, BLOCK):
        block = out[lo : lo + BLOCK]
        for factor, data in zip(factors, inputs, strict=True):
            product = scratch[: block.size]
            np.take(products()[factor], data[lo : lo + BLOCK], out=product, mode="clip")  # clip: no copy of `out`
            np.bitwise_xor(block, product, out=block)


@functools.cache
def library() -> ctypes.CDLL | None:
    """ISA-L, or None where none is found."""
    for candidate in ["libisal.so.2", *_in_wheel()]:
        try:
            found = ctypes.CDLL(str(candidate))
            found.ec_init_tables.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
            found.ec_encode_data.argtypes = [ctypes.c_int] * 3 + [ctypes.c_char_p] + [ctypes.c_void_p] * 2
        except (OSError, AttributeError):
            continue
        return found
    logger.warning("no ISA-L found: Reed-Solomon runs in NumPy, slowly. Install your system's isa-l, or pyeclib (pip).")
    return None


def _in_wheel() -> list[Path]:
    """The copy of ISA-L that a wheel of pyeclib has beside the package."""
    package = importlib.util.find_spec("pyeclib")
    places = package.submodule_search_locations if package else None
    return [path for place in places or () for path in sorted(Path(place).parent.glob("pyeclib.libs/libisal*.so*"))]


@functools.lru_cache(maxsize=1024)
def _tables(isal: ctypes.CDLL, factors: bytes) -> bytes:
    """ISA-L's expanded form of one row of factors: 32 bytes each, whose meaning is the library's own."""
    room = ctypes.create_string_buffer(32 * len(factors))
    isal.ec_init_tables(len(factors), 1, factors, room)
    return room.raw


def _combine_by_library(isal: ctypes.CDLL, out: np.ndarray, factors: list[int], inputs: list[np.ndarray]) -> None:
    tables = _tables(isal, bytes(factors))
    for lo in range(0, out.size, BLOCK):
        sources = (ctypes.c_void_p * len(inputs))(*(data.ctypes.data + lo for data in inputs))
        target = (ctypes.c_void_p * 1)(out.ctypes.data + lo)
        isal.ec_encode_data(min(BLOCK, out.size - lo), len(inputs), 1, tables, sources, target)
