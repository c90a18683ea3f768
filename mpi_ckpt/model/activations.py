"""The arrays between the layers: for one number of sequences, all views that a forward and a backward work in.

Of R tensor ranks each has 1 / R of the heads and of the hidden units; the residual stream is whole on all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpi_ckpt.model.attention import AttentionBuffers
from mpi_ckpt.model.config import ModelConfig
from mpi_ckpt.model.layers import GeluChunk, NormBuffers
from mpi_ckpt.model.softmax import LossBuffers
from mpi_ckpt.model.workspace import Workspace


class BlockActivations(NamedTuple):
    """Arrays of one block."""

    ln1: NormBuffers
    attention: AttentionBuffers
    ln2: NormBuffers
    hidden: np.ndarray  # [N, 4 d / R] the input of the GELU, then its slope
    active: np.ndarray  # [N, 4 d / R] the output of the GELU
    gelu: tuple[GeluChunk, ...]  # `hidden` and `active` in pieces

    @classmethod
    def take(cls, space: Workspace, name: str, b: int, config: ModelConfig, ranks: int) -> BlockActivations:
        """Arrays of one block for b sequences, on one of `ranks` tensor ranks."""
        n, d, units = b * config.seq_len, config.n_embd, 4 * config.n_embd // ranks
        hidden, active = space.take(f"{name}.hidden", n, units), space.take(f"{name}.active", n, units)
        return cls(
            NormBuffers.take(space, f"{name}.ln1", n, d),
            AttentionBuffers.take(space, f"{name}.attention", b, config, config.n_head // ranks),
            NormBuffers.take(space, f"{name}.ln2", n, d),
            hidden,
            active,
            GeluChunk.take(space, hidden, active),
        )


class Activations(NamedTuple):
    """Arrays of the whole model for b sequences: N = b T tokens."""

    ids: np.ndarray  # [2, b, T] integers: the tokens, then the targets
    places: np.ndarray  # [2, N] integers: where each token's, each target's id lies in a flat [N, V]
    row_starts: np.ndarray  # [N] integers: where each row of it begins
    x: np.ndarray  # [N, d] the residual stream
    blocks: tuple[BlockActivations, ...]
    ln_f: NormBuffers
    loss: LossBuffers
    branch: np.ndarray  # [N, d] what a block adds to the stream, and the gradient at its layer norm
    dx: np.ndarray  # [N, d] gradient of the stream
    dhidden: np.ndarray  # [N, 4 d / R]
    ones: np.ndarray  # [N]

    @classmethod
    def take(cls, space: Workspace, b: int, config: ModelConfig, ranks: int = 1) -> Activations:
        """Arrays for b sequences, on one of `ranks` tensor ranks. The first on a workspace must ask for the most."""
        n, d, vocab = b * config.seq_len, config.n_embd, config.vocab_size
        places = space.take("places", 2, n, dtype=np.intp)
        row_starts = space.take("row_starts", n, dtype=np.intp)
        np.multiply(np.arange(n), vocab, row_starts)
        ones = space.take("ones", n)
        ones.fill(1.0)
        return cls(
            ids=space.take("ids", 2, b, config.seq_len, dtype=np.intp),
            places=places,
            row_starts=row_starts,
            x=space.take("x", n, d),
            blocks=tuple(BlockActivations.take(space, f"blocks.{i}", b, config, ranks) for i in range(config.n_layer)),
            ln_f=NormBuffers.take(space, "ln_f", n, d),
            loss=LossBuffers.take(space, places[1], vocab),
            branch=space.take("branch", n, d),
            dx=space.take("dx", n, d),
            dhidden=space.take("dhidden", n, 4 * d // ranks),
            ones=ones,
        )
