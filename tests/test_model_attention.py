"""Causal attention and cross entropy against plain softmax, also where exp would overflow."""

import numpy as np
import pytest

from mpi_ckpt.model import ModelConfig
from mpi_ckpt.model.attention import AttentionBuffers, causal_attention, causal_attention_backward
from mpi_ckpt.model.softmax import LossBuffers, cross_entropy, cross_entropy_backward
from mpi_ckpt.model.workspace import Workspace


def softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def plain_attention(qkv, dz, batch, config):
    """(z [N, d], dqkv [N, 3 d]) in float64, one query at a time, straight from the definition."""
    t, heads, e = config.seq_len, config.n_head, config.head_dim
    qkv = qkv.astype(np.float64).reshape(batch, t, heads, 3, e)
    dz = dz.astype(np.float64).reshape(batch, t, heads, e)
    z, dqkv = np.zeros_like(dz), np.zeros_like(qkv)
    for b, h, i in np.ndindex(batch, heads, t):
        q, k, v = qkv[b, i, h, 0], qkv[b, : i + 1, h, 1], qkv[b, : i + 1, h, 2]
        p = softmax(k @ q / np.sqrt(e))
        z[b, i, h] = p @ v
        dp = v @ dz[b, i, h]
        ds = p * (dp - dp @ p) / np.sqrt(e)
        dqkv[b, i, h, 0] = ds @ k
        dqkv[b, : i + 1, h, 1] += np.outer(ds, q)
        dqkv[b, : i + 1, h, 2] += np.outer(p, dz[b, i, h])
    return z.reshape(batch * t, -1), dqkv.reshape(batch * t, -1)


@pytest.mark.parametrize("seq_len", [1, 7, 64, 65, 130])
@pytest.mark.parametrize("magnitude", [1.0, 30.0, 1000.0], ids=["moderate", "large", "extreme"])
def test_attention_equals_a_plain_softmax_whatever_the_size_of_the_scores(seq_len, magnitude):
    """Scores of up to about 1, 1e3 and 1e6. Both in float64, so that rounding of huge scores decides nothing."""
    config, batch = ModelConfig(n_embd=15, n_head=3, seq_len=seq_len), 2
    rng = np.random.default_rng(seq_len)
    buf = AttentionBuffers.take(Workspace(np.float64), "attention", batch, config, config.n_head)
    qkv, dz = magnitude * rng.normal(size=buf.qkv.shape), rng.normal(size=buf.dz.shape)
    buf.qkv[...] = qkv
    z, dqkv = plain_attention(qkv, dz, batch, config)
    np.testing.assert_allclose(causal_attention(buf), z, rtol=1e-9, atol=1e-12 * magnitude)
    buf.dz[...] = dz
    np.testing.assert_allclose(causal_attention_backward(buf), dqkv, rtol=1e-9, atol=1e-9 * magnitude)


@pytest.mark.parametrize("magnitude", [2.0**0, 2.0**5, 2.0**17])
def test_float32_attention_stays_finite_and_close_to_a_plain_softmax(magnitude):
    """Integers times a power of two and heads of width 4 make scores of up to 1e11 exact in float32, ties included.

    A gradient of q or k is a sum of products dz v k, so its rounding grows with the square of the magnitude.
    """
    config, batch = ModelConfig(n_embd=12, n_head=3, seq_len=70), 1
    rng = np.random.default_rng(1)
    buf = AttentionBuffers.take(Workspace(np.float32), "attention", batch, config, config.n_head)
    qkv = rng.integers(-3, 4, buf.qkv.shape).astype(np.float32) * np.float32(magnitude)
    buf.qkv[...], buf.dz[...] = qkv, rng.normal(size=buf.dz.shape)
    z, dqkv = plain_attention(qkv, buf.dz, batch, config)
    np.testing.assert_allclose(causal_attention(buf), z, rtol=1e-3, atol=1e-3 * magnitude)
    np.testing.assert_allclose(causal_attention_backward(buf), dqkv, rtol=1e-3, atol=5e-6 * magnitude**2)


@pytest.mark.parametrize("offset", [0.0, -120.0, 200.0, 3e4], ids=str)
def test_cross_entropy_equals_a_plain_softmax_whatever_the_size_of_the_logits(offset):
    """An offset common to all logits changes nothing; -120 would make every float32 exp zero."""
    rng, n, vocab = np.random.default_rng(2), 21, 57
    target = rng.integers(0, vocab, n)
    buf = LossBuffers.take(Workspace(np.float32), np.arange(n) * vocab + target, vocab)
    buf.logits[...] = offset + rng.integers(-12, 13, (n, vocab))
    p = softmax(buf.logits.astype(np.float64))
    assert cross_entropy(buf) == pytest.approx(-np.log(p[np.arange(n), target]).sum(), rel=1e-6)
    p[np.arange(n), target] -= 1.0
    np.testing.assert_allclose(cross_entropy_backward(buf), p, rtol=1e-5, atol=1e-6)
