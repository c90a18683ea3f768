"""The sizes of MiniGPT, and where each of its parameters lies in the flat vector.

Convention: all parameters form one flat vector, in the order of `ModelConfig.parameters()`. Where tensor parallelism
can split a matrix over ranks (Megatron-LM, arXiv:1909.08053), the axis that is split comes first in the stored shape,
so that each rank's part is one interval of the flat vector:

- `qkv.weight` [3 d, d] and `fc.weight` [4 d, d] are stored (out, in), y = x W^T + b, and are split by output. The rows
  of qkv are ordered heads first, [n_head, 3, head_dim]: the query, key and value rows of one head are neighbours;
- `attn_proj.weight` [d, d] and `mlp_proj.weight` [4 d, d] are stored (in, out), y = x W + b, and are split by input:
  each rank's x W is a partial sum, and the bias is added once, after the ranks' sums are added.

All other parameters are the same on all tensor ranks. `mpi_ckpt.model.split` says what each of them holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

INIT_STD = 0.02  # of the normal distribution that weights start from, as in GPT-2
SPLIT_LAYERS = ("qkv.weight", "qkv.bias", "attn_proj.weight", "fc.weight", "fc.bias", "mlp_proj.weight")


@dataclass(frozen=True)
class Parameter:
    """One named array of the flat vector: elements `start` to `stop`, in C order.

    Its initial values are drawn from Normal(`init_mean`, `init_std`); `decays` says whether weight decay applies to it,
    `splits` whether the ranks that share a model hold a part each.
    """

    name: str
    start: int
    shape: tuple[int, ...]
    decays: bool
    splits: bool
    init_mean: float
    init_std: float

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element's place in the flat vector."""
        return self.start + self.size


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model, each at least 1. Raises ValueError naming the field, what was found and what expected."""

    n_layer: int = 2
    n_embd: int = 32
    n_head: int = 4
    vocab_size: int = 64
    seq_len: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{field.name}: found {value!r}, expected an integer of at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd: found {self.n_embd}, expected a multiple of n_head, which is {self.n_head}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def num_params(self) -> int:
        """P, the length of the flat vector."""
        return self.parameters()[-1].stop

    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, in flat order, without gaps."""
        return _parameters(self)


@lru_cache(maxsize=64)
def _parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    placed: list[Parameter] = []
    for name, shape, mean, std in _shapes(config):
        start = placed[-1].stop if placed else 0
        splits = name.endswith(SPLIT_LAYERS)
        placed.append(Parameter(name, start, shape, len(shape) > 1, splits, init_mean=mean, init_std=std))
    return tuple(placed)


def _shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """(name, shape, mean, std) in flat order; the initial values are those of GPT-2.

    Each block adds two projections to the residual stream; scaling them by 1 / sqrt(2 n_layer) keeps the stream's
    variance the same for every depth (Radford et al. 2019, section 2.3).
    """
    d, vocab, seq = config.n_embd, config.vocab_size, config.seq_len
    residual_std = INIT_STD / math.sqrt(2 * config.n_layer)

    def weight_and_bias(
        name: str, shape: tuple[int, ...], outputs: int, mean: float, std: float
    ) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        yield f"{name}.weight", shape, mean, std
        yield f"{name}.bias", (outputs,), 0.0, 0.0

    yield "wte.weight", (vocab, d), 0.0, INIT_STD
    yield "wpe.weight", (seq, d), 0.0, INIT_STD
    for i in range(config.n_layer):
        yield from weight_and_bias(f"blocks.{i}.ln1", (d,), d, 1.0, 0.0)
        yield from weight_and_bias(f"blocks.{i}.qkv", (3 * d, d), 3 * d, 0.0, INIT_STD)
        yield from weight_and_bias(f"blocks.{i}.attn_proj", (d, d), d, 0.0, residual_std)
        yield from weight_and_bias(f"blocks.{i}.ln2", (d,), d, 1.0, 0.0)
        yield from weight_and_bias(f"blocks.{i}.fc", (4 * d, d), 4 * d, 0.0, INIT_STD)
        yield from weight_and_bias(f"blocks.{i}.mlp_proj", (4 * d, d), d, 0.0, residual_std)
    yield from weight_and_bias("ln_f", (d,), d, 1.0, 0.0)
    yield "head.weight", (vocab, d), 0.0, INIT_STD
