"""The flat vector of parameters or gradients: its first values, and views by name.

`views.blocks[0].qkv.weight` is the parameter `blocks.0.qkv.weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpi_ckpt.model.split import Part


class WeightBias(NamedTuple):
    """A layer's weight (one or two axes) and bias (one axis)."""

    weight: np.ndarray
    bias: np.ndarray


class BlockParameters(NamedTuple):
    """The parameters of one block, or their gradients. The field names are those of the flat order."""

    ln1: WeightBias
    qkv: WeightBias
    attn_proj: WeightBias
    ln2: WeightBias
    fc: WeightBias
    mlp_proj: WeightBias


class Parameters(NamedTuple):
    """The parameters of the model, or their gradients."""

    wte: np.ndarray
    wpe: np.ndarray
    blocks: tuple[BlockParameters, ...]
    ln_f: WeightBias
    head: np.ndarray


def initial_parameters(parts: Sequence[Part], seed: int) -> np.ndarray:
    """[P of `parts`] float32, drawn in flat order from each parameter's normal distribution: a pure function.

    Whole parameters are drawn, whatever part of them is kept: the ranks that share a model hold parts of the same one.
    """
    draw = np.random.default_rng(seed).standard_normal
    flat = np.empty(parts[-1].stop, np.float32)
    for p in parts:
        flat[p.start : p.stop] = p.whole.init_mean
        if p.whole.init_std:
            drawn = draw(p.whole.size, dtype=np.float32)[p.offset : p.offset + p.size]
            flat[p.start : p.stop] += np.float32(p.whole.init_std) * drawn
    return flat


def views_of(parts: Sequence[Part], flat: np.ndarray) -> Parameters:
    """Views of the contiguous vector `flat` [P of `parts`], in the parts' shapes."""
    named = {p.whole.name: flat[p.start : p.stop].reshape(p.shape) for p in parts}
    n_layer = sum(name.endswith(".ln1.weight") for name in named)

    def layer(name: str) -> WeightBias:
        return WeightBias(named[f"{name}.weight"], named[f"{name}.bias"])

    blocks = tuple(
        BlockParameters(*(layer(f"blocks.{i}.{name}") for name in BlockParameters._fields)) for i in range(n_layer)
    )
    return Parameters(named["wte.weight"], named["wpe.weight"], blocks, layer("ln_f"), named["head.weight"])


class RememberedViews:
    """`views_of` the vector that came last: a training loop passes the same one at every step."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._flat: np.ndarray | None = None
        self._views: Parameters | None = None

    def of(self, flat: np.ndarray) -> Parameters:
        """Views of `flat` [P]."""
        if self._views is None or flat is not self._flat:
            self._flat, self._views = flat, views_of(self._parts, flat)
        return self._views
