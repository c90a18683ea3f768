"""Causal multi-head attention, forward and backward, on views of the fused rows of queries, keys and values.

Shapes: b sequences, H heads, T positions, e the width of a head, d = H e. Of a model that tensor ranks share, H counts
the heads of this rank, which need nothing of the others. Queries go in blocks of rows, and a block
meets only the keys up to its own last row: a mask is needed in the square on the diagonal alone, and long sequences
skip up to half of the scores.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpi_ckpt.model.config import ModelConfig
from mpi_ckpt.model.softmax import moderate, subtract_row_maximum
from mpi_ckpt.model.workspace import Workspace

BLOCK_ROWS = 64


class Heads(NamedTuple):
    """The arrays of one attention layer (or their derivatives) seen head by head: [b, H, T or a part of it, e]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    z: np.ndarray

    @classmethod
    def of(cls, qkv: np.ndarray, z: np.ndarray, t: int, h: int) -> Heads:
        """Views of qkv [N, 3 d], whose columns are [H, 3, e], and z [N, d], for t positions and h heads."""
        b, e = len(z) // t, z.shape[1] // h
        q, k, v = qkv.reshape(b, t, h, 3, e).transpose(3, 0, 2, 1, 4)
        return cls(q, k, v, z.reshape(b, t, h, e).transpose(0, 2, 1, 3))

    def block(self, first: int, last: int) -> Heads:
        """Queries `first` to `last` with the keys and values 0 to `last`."""
        rows, keys = np.s_[:, :, first:last], np.s_[:, :, :last]
        return Heads(self.q[rows], self.k[keys], self.v[keys], self.z[rows])


class QueryBlock(NamedTuple):
    """r neighbouring queries of every sequence and head, and the c keys up to the last of them."""

    heads: Heads
    grads: Heads
    weights: np.ndarray  # [b, H, r, c] exp(scores)
    diagonal: np.ndarray  # [b, H, r, r] the last r columns of `weights`
    mask: np.ndarray  # [r, r] 0 where a query may look, -inf where not
    ones: np.ndarray  # [c]
    row_max: np.ndarray  # [b, H, r, 1] scratch
    row_sum: np.ndarray  # [b, H, r, 1] of `weights`
    dz_z: np.ndarray  # [b, H, r, 1] view of AttentionBuffers.dz_z
    dscores: np.ndarray  # [b, H, r, c] scratch
    term: np.ndarray  # [b, H, c, e] scratch: this block's part of dk or dv


class AttentionBuffers(NamedTuple):
    """Arrays of one attention layer. The caller fills `qkv` before the forward and `dz` before the backward."""

    qkv: np.ndarray  # [N, 3 d], columns [H, 3, e]
    z: np.ndarray  # [N, d]
    dqkv: np.ndarray  # [N, 3 d]
    dz: np.ndarray  # [N, d]
    heads: Heads  # views of qkv and z
    grads: Heads  # views of dqkv and dz
    product: np.ndarray  # [N H, e] scratch
    ones: np.ndarray  # [e]
    dz_z: np.ndarray  # [N H] sum of dz * z over a head
    blocks: tuple[QueryBlock, ...]

    @classmethod
    def take(cls, space: Workspace, name: str, b: int, config: ModelConfig, h: int) -> AttentionBuffers:
        """Buffers for b sequences and `h` of the model's heads."""
        t, e = config.seq_len, config.head_dim
        d = h * e
        qkv, z = space.take(f"{name}.qkv", b * t, 3 * d), space.take(f"{name}.z", b * t, d)
        dqkv, dz = space.take("attention.dqkv", b * t, 3 * d), space.take("attention.dz", b * t, d)
        heads, grads = Heads.of(qkv, z, t, h), Heads.of(dqkv, dz, t, h)
        product, dz_z = space.take("attention.product", b * t * h, e), space.take("attention.dz_z", b * t * h)
        ones = space.take("attention.ones", max(t, e))
        ones.fill(1.0)
        dz_z_heads = dz_z.reshape(b, t, h, 1).transpose(0, 2, 1, 3)
        blocks = []
        for first in range(0, t, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, t)
            block, block_grads = heads.block(first, last), grads.block(first, last)
            blocks.append(_query_block(space, name, block, block_grads, dz_z_heads[:, :, first:last], ones[:last], t))
        return cls(qkv, z, dqkv, dz, heads, grads, product, ones[:e], dz_z, tuple(blocks))


def _query_block(
    space: Workspace, name: str, heads: Heads, grads: Heads, dz_z: np.ndarray, ones: np.ndarray, t: int
) -> QueryBlock:
    b, h, r, e = heads.q.shape
    c = len(ones)
    weights = space.take(f"{name}.weights{c}", b, h, r, c)
    mask = space.take(f"attention.mask{r}", r, r)
    mask[np.triu_indices(r, 1)] = -np.inf
    space.take("attention.dscores", b, h, min(t, BLOCK_ROWS), t)  # the largest of all blocks, which share it
    space.take("attention.term", b, h, t, e)
    return QueryBlock(
        heads,
        grads,
        weights,
        diagonal=weights[..., c - r :],
        mask=mask,
        ones=ones,
        row_max=space.take(f"attention.row_max{r}", b, h, r, 1),
        row_sum=space.take(f"{name}.row_sum{c}", b, h, r, 1),
        dz_z=dz_z,
        dscores=space.take("attention.dscores", b, h, r, c),
        term=space.take("attention.term", b, h, c, e),
    )


def causal_attention(buf: AttentionBuffers) -> np.ndarray:
    """z = softmax(q k^T / sqrt(e) + mask) v   for every sequence and head.   (arXiv:1706.03762)

    With E = exp(scores):   z = (E v) / rowsum(E),   which divides e columns where softmax(scores) would divide T.

    qkv [N, 3 d] -> z [N, d].
    On return the queries in `buf.qkv` are divided by sqrt(e), and each block's E and its row sums are kept.
    """
    queries = buf.heads.q
    np.multiply(queries, 1.0 / math.sqrt(queries.shape[-1]), queries)
    for block in buf.blocks:
        (q, k, v, z), weights = block.heads, block.weights
        np.matmul(q, k.swapaxes(2, 3), weights)
        in_range = moderate(weights.reshape(-1))  # asked before the mask's infinities are in
        np.add(block.diagonal, block.mask, block.diagonal)
        if not in_range:
            subtract_row_maximum(weights, block.row_max)
        np.exp(weights, weights)
        np.dot(weights.reshape(-1, len(block.ones)), block.ones, block.row_sum.reshape(-1))
        np.matmul(weights, v, z)
        np.divide(z, block.row_sum, z)
    return buf.z


def causal_attention_backward(buf: AttentionBuffers) -> np.ndarray:
    """With S = q k^T / sqrt(e) + mask and P = softmax(S):

    dv = P^T dz,   dP = dz v^T,   dS = P * (dP - rowsum(dP * P)),   dq = dS k / sqrt(e),   dk = dS^T q / sqrt(e).

    dz [N, d] -> dqkv [N, 3 d].

    rowsum(dP * P) = rowsum(dz * z), a sum over e columns instead of T (arXiv:2205.14135, appendix B.2). P is
    E / rowsum(E) and all is linear in dz, so dz is divided by the row sums, in place, and E stands where P does above.
    """
    for block in buf.blocks:
        np.divide(block.grads.z, block.row_sum, block.grads.z)
    np.multiply(buf.dz.reshape(buf.product.shape), buf.z.reshape(buf.product.shape), buf.product)
    np.dot(buf.product, buf.ones, buf.dz_z)
    for block in reversed(buf.blocks):
        (q, k, v, _), (dq, dk, dv, dz), dscores = block.heads, block.grads, block.dscores
        np.matmul(dz, v.swapaxes(2, 3), dscores)
        np.subtract(dscores, block.dz_z, dscores)
        np.multiply(dscores, block.weights, dscores)
        np.matmul(dscores, k, dq)
        if block is buf.blocks[-1]:  # the first to come: it meets all keys and writes, the others add
            np.matmul(dscores.swapaxes(2, 3), q, dk)
            np.matmul(block.weights.swapaxes(2, 3), dz, dv)
        else:
            np.add(dk, np.matmul(dscores.swapaxes(2, 3), q, block.term), dk)
            np.add(dv, np.matmul(block.weights.swapaxes(2, 3), dz, block.term), dv)
    dqueries = buf.grads.q
    np.multiply(dqueries, 1.0 / math.sqrt(dqueries.shape[-1]), dqueries)
    return buf.dqkv
