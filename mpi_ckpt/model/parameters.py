"""The flat vector of parameters or gradients: its first values, and views by name.

`views.blocks[0].qkv.weight` is the parameter `blocks.0.qkv.weight`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpi_ckpt.model.config import ModelConfig


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


def initial_parameters(config: ModelConfig, seed: int) -> np.ndarray:
    """[P] float32, drawn in flat order from each parameter's normal distribution: a pure function of its arguments."""
    draw = np.random.default_rng(seed).standard_normal
    flat = np.empty(config.num_params, np.float32)
    for p in config.parameters():
        flat[p.start : p.stop] = p.init_mean
        if p.init_std:
            flat[p.start : p.stop] += np.float32(p.init_std) * draw(p.size, dtype=np.float32)
    return flat


def views_of(config: ModelConfig, flat: np.ndarray) -> Parameters:
    """Views of the contiguous vector `flat` [P], in the shapes of `config.parameters()`."""
    named = {p.name: flat[p.start : p.stop].reshape(p.shape) for p in config.parameters()}

    def layer(name: str) -> WeightBias:
        return WeightBias(named[f"{name}.weight"], named[f"{name}.bias"])

    blocks = tuple(
        BlockParameters(*(layer(f"blocks.{i}.{name}") for name in BlockParameters._fields))
        for i in range(config.n_layer)
    )
    return Parameters(named["wte.weight"], named["wpe.weight"], blocks, layer("ln_f"), named["head.weight"])


class RememberedViews:
    """`views_of` the vector that came last: a training loop passes the same one at every step."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._flat: np.ndarray | None = None
        self._views: Parameters | None = None

    def of(self, flat: np.ndarray) -> Parameters:
        """Views of `flat` [P]."""
        if self._views is None or flat is not self._flat:
            self._flat, self._views = flat, views_of(self._config, flat)
        return self._views
