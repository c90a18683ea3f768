"""What one of T tensor ranks holds of the model (Megatron-LM, arXiv:1909.08053), and what the model asks of the others.

A rank's flat vector holds its parts of all parameters, in the same order. It has the same length on every tensor rank,
and a parameter that is not split lies at the same place in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mpi_ckpt.model.config import ModelConfig, Parameter


class TensorRanks(Protocol):
    """The ranks that share the model, as one of them sees them."""

    @property
    def rank(self) -> int:
        """This one, from 0."""

    @property
    def size(self) -> int:
        """T, how many they are."""

    def allreduce(self, array: np.ndarray) -> None:
        """Replace `array`, contiguous, by its sum over the ranks, in place."""


class Alone:
    """One rank that holds all of the model."""

    rank, size = 0, 1

    def allreduce(self, array: np.ndarray) -> None:
        """The sum over one rank."""


ALONE = Alone()


@dataclass(frozen=True)
class Part:
    """A rank's part of a parameter: elements `start` to `stop` of the rank's flat vector, in C order."""

    whole: Parameter
    start: int
    shape: tuple[int, ...]
    offset: int  # in `whole`, of the first element

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element's place in the rank's flat vector."""
        return self.start + self.size

    @property
    def decays(self) -> bool:
        """Whether weight decay applies to it."""
        return self.whole.decays

    @property
    def whole_start(self) -> int:
        """The first element's place in the flat vector of the whole model."""
        return self.whole.start + self.offset


@lru_cache(maxsize=64)
def parts_of(config: ModelConfig, rank: int = 0, size: int = 1) -> tuple[Part, ...]:
    """The parts of tensor rank `rank` of `size`, in flat order, without gaps; of one rank, all there is.

    Raises ValueError unless the heads can be dealt evenly. As heads divide the width, what else is split then can, too.
    """
    if config.n_head % size:
        raise ValueError(f"n_head: found {config.n_head}, expected a multiple of the number of tensor ranks, {size}")
    parts: list[Part] = []
    for whole in config.parameters():
        start = parts[-1].stop if parts else 0
        first, *rest = whole.shape
        if whole.splits:
            first //= size
        shape = (first, *rest)
        parts.append(Part(whole, start, shape, offset=rank * math.prod(shape) if whole.splits else 0))
    return tuple(parts)
