"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2), in place.

The work is cut into blocks that stay in the cache. Only + - * / and sqrt are used, which IEEE 754 rounds correctly, so
the update of an element is the same to the bit wherever a shard or a block begins.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpi_ckpt.parallel.aligned import aligned_zeros
from mpi_ckpt.parallel.float16 import Float16Cast

BLOCK = 32768  # elements: six float32 arrays of 128 KiB; below it the calls cost more than the cache saves

Intervals = Sequence[tuple[int, int]]  # sorted, disjoint [start, stop)


@dataclass(frozen=True)
class AdamWOptions:
    """The paper's beta1, beta2, epsilon and lambda. Raises ValueError that names the field."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}: found {getattr(self, name)}; expected a number in [0, 1)")
        if not 0.0 < self.eps < math.inf:
            raise ValueError(f"eps: found {self.eps}; expected a positive number")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: found {self.weight_decay}; expected a number that is not negative")


class Scratch:
    """Memory that an update works in, allocated once: 20 bytes an element of one block."""

    def __init__(self) -> None:
        self.a = aligned_zeros(BLOCK, np.float32)
        self.b = aligned_zeros(BLOCK, np.float32)
        self.to_float16 = Float16Cast(BLOCK)


def adamw_update(
    master: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    grad: np.ndarray,
    param: np.ndarray,
    options: AdamWOptions,
    scratch: Scratch,
    *,
    lr: float,
    step: int,
    grad_scale: float = 1.0,
    decay_intervals: Intervals | None = None,
) -> None:
    """**Local.** One step, in place: `master`, `m`, `v` float32 [n] are updated, `param` [n] is written from `master`.

    `grad` float32 [n] is only read; `grad_scale` times it is the gradient (1 / tokens, times a clipping factor).
    `param` is float16 or float32. `step` counts from 1. `decay_intervals` are the intervals of these arrays that decay;
    None: all. As in PyTorch, the decay is lr * weight_decay: the paper's schedule multiplier is part of lr.
    """
    c = _coefficients(options, lr, step, grad_scale)
    everything = [(0, master.size)]
    decaying = everything if decay_intervals is None else decay_intervals
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # a bad step shows in the gradient's norm
        for low in range(0, master.size, BLOCK):
            high = min(low + BLOCK, master.size)
            weights = master[low:high]
            if options.weight_decay:
                for start, stop in intervals_within(decaying, low, high):
                    np.multiply(weights[start:stop], c.keep, out=weights[start:stop])
            update = _adam(m[low:high], v[low:high], grad[low:high], scratch, c)
            np.subtract(weights, update, out=weights)
            if param.dtype == np.float16:
                scratch.to_float16(weights, param[low:high])
            else:
                np.copyto(param[low:high], weights)


class _Coefficients(NamedTuple):
    """Computed in float64 for a step, then rounded to float32 once."""

    grad_scale: np.float32
    beta1: np.float32
    beta2: np.float32
    one_minus_beta1: np.float32
    one_minus_beta2: np.float32
    eps: np.float32  # eps * sqrt(1 - beta2^t)
    rate: np.float32  # lr * sqrt(1 - beta2^t) / (1 - beta1^t)
    keep: np.float32  # 1 - lr * weight_decay


def _coefficients(options: AdamWOptions, lr: float, step: int, grad_scale: float) -> _Coefficients:
    """Both bias corrections folded into the rate and eps (Kingma and Ba, arXiv:1412.6980, end of section 2)."""
    root = math.sqrt(1.0 - options.beta2**step)
    values = (
        grad_scale,
        options.beta1,
        options.beta2,
        1.0 - options.beta1,
        1.0 - options.beta2,
        options.eps * root,
        lr * root / (1.0 - options.beta1**step),
        1.0 - lr * options.weight_decay,
    )
    return _Coefficients(*map(np.float32, values))


def _adam(m: np.ndarray, v: np.ndarray, grad: np.ndarray, scratch: Scratch, c: _Coefficients) -> np.ndarray:
    """Update the moments of one block and return what is subtracted from its weights, a view of `scratch`."""
    g, t = scratch.a[: grad.size], scratch.b[: grad.size]
    np.multiply(grad, c.grad_scale, out=g)
    np.multiply(m, c.beta1, out=m)  # m = beta1 m + (1 - beta1) g
    np.multiply(g, c.one_minus_beta1, out=t)
    np.add(m, t, out=m)
    np.multiply(v, c.beta2, out=v)  # v = beta2 v + (1 - beta2) g^2
    np.multiply(g, g, out=g)
    np.multiply(g, c.one_minus_beta2, out=g)
    np.add(v, g, out=v)
    np.sqrt(v, out=t)  # rate * m / (sqrt(v) + eps)
    np.add(t, c.eps, out=t)
    np.divide(m, t, out=t)
    np.multiply(t, c.rate, out=t)
    return t


def intervals_within(intervals: Intervals, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The parts of sorted, disjoint intervals that lie in [low, high), counted from `low`."""
    first = max(bisect_right(intervals, (low,)) - 1, 0)
    for start, stop in intervals[first:]:
        if start >= high:
            return
        if max(start, low) < min(stop, high):
            yield max(start, low) - low, min(stop, high) - low
