"""Exponentials that cannot overflow, and the cross entropy, forward and backward.

Shapes: N tokens, V vocabulary. `dz` means the derivative of the loss with respect to `z`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpi_ckpt.model.workspace import Workspace

EXP_LIMIT = 60.0  # exp(+-60), and sums and products of a million such values, lie inside float32's range


def moderate(z: np.ndarray) -> bool:
    """Whether exp(z) may be taken of every value of the flat array z as it is. No for NaN.

    Two passes over a flat array cost a tenth of what the maxima of short rows do, and nearly always say yes.
    """
    return bool(np.minimum.reduce(z) > -EXP_LIMIT and np.maximum.reduce(z) < EXP_LIMIT)


def subtract_row_maximum(z: np.ndarray, row_max: np.ndarray) -> None:
    """z -= the maximum of each row (last axis), in place: softmax(z) stays the same and exp(z) is at most 1.

    `row_max` [..., 1] is scratch.
    """
    np.maximum.reduce(z, axis=-1, keepdims=True, out=row_max)
    np.subtract(z, row_max, z)


class LossBuffers(NamedTuple):
    """Arrays of the cross entropy. The caller fills `logits` and `target`."""

    logits: np.ndarray  # [N, V]
    flat: np.ndarray  # [N V], the same memory
    target: np.ndarray  # [N] the place in `flat` of each token's target
    row_max: np.ndarray  # [N, 1] scratch
    row_sum: np.ndarray  # [N] of exp(logits), for the backward
    token_loss: np.ndarray  # [N]
    picked: np.ndarray  # [N] scratch: the targets' logits
    ones: np.ndarray  # [V]

    @classmethod
    def take(cls, space: Workspace, target: np.ndarray, vocab_size: int) -> LossBuffers:
        """Buffers for the tokens of `target` [N]."""
        n = len(target)
        logits, ones = space.take("loss.logits", n, vocab_size), space.take("loss.ones", vocab_size)
        ones.fill(1.0)
        return cls(
            logits=logits,
            flat=logits.reshape(-1),
            target=target,
            row_max=space.take("loss.row_max", n, 1),
            row_sum=space.take("loss.row_sum", n),
            token_loss=space.take("loss.token_loss", n),
            picked=space.take("loss.picked", n),
            ones=ones,
        )


def cross_entropy(buf: LossBuffers) -> float:
    """Sum over tokens of  -log softmax(z)[target] = log(sum(exp(z))) - z[target],   in nats, added in float64.

    z is `buf.logits` [N, V], which holds exp(z), up to a factor a row, on return.
    """
    if not moderate(buf.flat):
        subtract_row_maximum(buf.logits, buf.row_max)
    np.take(buf.flat, buf.target, out=buf.picked, mode="clip")  # mode "raise" would go through a copy of `out`
    np.exp(buf.logits, buf.logits)
    np.dot(buf.logits, buf.ones, buf.row_sum)
    np.log(buf.row_sum, buf.token_loss)
    np.subtract(buf.token_loss, buf.picked, buf.token_loss)
    return float(np.add.reduce(buf.token_loss, dtype=np.float64))


def cross_entropy_backward(buf: LossBuffers) -> np.ndarray:
    """dz = softmax(z) - onehot(target)   [N, V], in place of what `cross_entropy` left in `buf.logits`."""
    np.divide(buf.logits, buf.row_sum[:, None], buf.logits)
    buf.flat[buf.target] -= 1.0
    return buf.logits
