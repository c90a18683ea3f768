"""The field GF(2^8) and the matrices of a systematic Reed-Solomon code over it. Small, exact, pure.

The field is that of ISA-L, the bytes as polynomials modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), with addition as XOR.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

_POLYNOMIAL = 0x11D


@functools.cache
def products() -> np.ndarray:
    """uint8 [256, 256]: row a holds a times every byte."""
    powers = [1]  # of x, which generates the whole group
    for _ in range(254):
        power = powers[-1] << 1
        powers.append(power ^ _POLYNOMIAL if power > 255 else power)
    logarithm = np.zeros(256, np.int64)
    logarithm[powers] = np.arange(255)
    table = np.array(powers, np.uint8)[(logarithm[:, None] + logarithm[None, :]) % 255]
    table[0, :] = table[:, 0] = 0
    return table


@functools.cache
def inverses() -> np.ndarray:
    """uint8 [256]: 1 / a for every byte a; 0 for 0, which has none."""
    return np.argmax(products() == 1, axis=1).astype(np.uint8)


@functools.cache
def generator(k: int, m: int) -> np.ndarray:
    """uint8 [k + m, k]: how the k data pieces and m parity pieces of a stripe follow from the data pieces.

    Identity over a Cauchy matrix, 1 / (i ^ j) for i = k..k+m-1 and j = 0..k-1, as `gf_gen_cauchy1_matrix` of ISA-L
    makes it: every square part of a Cauchy matrix can be inverted, so that any k pieces give all (J. Blömer et al., "An
    XOR-Based Erasure-Resilient Coding Scheme", ICSI TR-95-048, 1995). One parity is the plain sum, XOR.
    """
    if k + m > 256:
        raise ValueError(f"found {k} + {m} pieces, expected at most 256 in a code over GF(2^8)")
    rows = np.arange(k, k + m)[:, None] ^ np.arange(k)[None, :]
    parity = inverses()[rows] if m > 1 else np.ones((m, k), np.uint8)
    found = np.concatenate([np.eye(k, dtype=np.uint8), parity])
    found.flags.writeable = False  # shared by all who ask
    return found


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of two matrices, uint8 [r, k] and [k, c], over the field."""
    return np.bitwise_xor.reduce(products()[a[:, :, None], b[None, :, :]], axis=1)


def invert(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a square matrix by Gauss-Jordan elimination. Raises ValueError where there is none."""
    k = len(matrix)
    work = np.concatenate([matrix, np.eye(k, dtype=np.uint8)], axis=1)
    for column in range(k):
        pivot = column + int(np.argmax(work[column:, column] != 0))
        if work[pivot, column] == 0:
            raise ValueError("the matrix has no inverse")
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = products()[inverses()[work[column, column]], work[column]]
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= products()[factors[:, None], work[column][None, :]]
    return work[:, k:]


def recovery(k: int, m: int, known: Sequence[int], wanted: Sequence[int]) -> np.ndarray:
    """uint8 [len(wanted), k]: the `wanted` pieces as sums of the k `known` ones, by their rows of the generator."""
    rows = generator(k, m)
    return multiply(rows[list(wanted)], invert(rows[list(known)]))
