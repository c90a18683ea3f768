"""AdamW against the paper in float64 and against PyTorch; its bits do not depend on the shards; the float16 cast."""

from __future__ import annotations

import os
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_ckpt.parallel.adamw import BLOCK, AdamWOptions, Scratch, adamw_update, intervals_within
from mpi_ckpt.parallel.float16 import Float16Cast

RATES = [0.003, 0.01, 0.009, 0.005, 0.0] * 4  # a schedule of 20 steps


def gradients(n: int, steps: int = len(RATES)) -> np.ndarray:
    """float32 [steps, n] of very different sizes, zeros among them."""
    rng = np.random.default_rng(n)
    scale = 10.0 ** rng.uniform(-6, 2, n)
    scale[::11] = 0.0
    return (rng.standard_normal((steps, n)) * scale).astype(np.float32)


def initial(n: int) -> np.ndarray:
    return np.random.default_rng(n + 1).standard_normal(n).astype(np.float32)


class Shards:
    """master, m, v and param of `n` elements, updated in the pieces that `bounds` cut."""

    def __init__(self, weights, *, bounds=(), param_dtype=np.float16, decay_intervals=None, **options):
        self.master, self.m, self.v = weights.copy(), np.zeros_like(weights), np.zeros_like(weights)
        self.param = np.zeros(weights.size, param_dtype)
        self.bounds = [0, *bounds, weights.size]
        self.decay_intervals = decay_intervals
        self.options, self.scratch, self.steps = AdamWOptions(**options), Scratch(), 0

    def update(self, grad, lr, grad_scale=1.0):
        self.steps += 1
        for low, high in zip(self.bounds[:-1], self.bounds[1:], strict=True):
            within = self.decay_intervals and list(intervals_within(self.decay_intervals, low, high))
            pieces = [a[low:high] for a in (self.master, self.m, self.v, grad, self.param)]
            adamw_update(
                *pieces,
                self.options,
                self.scratch,
                lr=lr,
                step=self.steps,
                grad_scale=grad_scale,
                decay_intervals=within,
            )

    def bits(self):
        return tuple(a.tobytes() for a in (self.master, self.m, self.v, self.param))


def paper(weights, grads, rates, beta1, beta2, eps, decay):
    """arXiv:1711.05101, Algorithm 2, line by line in float64; alpha = 1, eta_t = the rate."""
    theta = weights.astype(np.float64)
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, (g, eta) in enumerate(zip(grads.astype(np.float64), rates, strict=True), start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        theta = theta - eta * (m_hat / (np.sqrt(v_hat) + eps) + decay * theta)
    return theta, m, v


@pytest.mark.parametrize("n", [1, 7, 57, 1009, BLOCK + 57])
def test_twenty_steps_follow_the_paper(n):
    shard, grads = Shards(initial(n), beta2=0.99, weight_decay=0.3), gradients(n)
    for grad, lr in zip(grads, RATES, strict=True):
        shard.update(grad, lr)
    theta, m, v = paper(initial(n), grads, RATES, 0.9, 0.99, 1e-8, 0.3)
    np.testing.assert_allclose(shard.master, theta, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(shard.m, m, rtol=1e-5, atol=1e-6 * np.abs(grads).max(axis=0, initial=0).max())
    np.testing.assert_allclose(shard.v, v, rtol=1e-5)


def test_twenty_steps_follow_torch():
    torch = pytest.importorskip("torch", reason="the independent implementation is PyTorch's: extra `torch`")
    shard, grads = Shards(initial(1009), beta1=0.8, eps=1e-6), gradients(1009)
    theta = torch.nn.Parameter(torch.from_numpy(initial(1009)))
    peer = torch.optim.AdamW([theta], betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for grad, lr in zip(grads, RATES, strict=True):
        shard.update(grad, lr)
        peer.param_groups[0]["lr"] = lr
        theta.grad = torch.from_numpy(grad.copy())
        peer.step()
    np.testing.assert_allclose(shard.master, theta.detach().numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("n", [7, 57, 1009, 2 * BLOCK + 57])
def test_an_element_s_update_does_not_depend_on_where_its_shard_begins(n):
    grads = gradients(n, steps=5)
    decay = [(1, n // 3), (n // 2, n - 2)]
    splits = [(), (1,), (n // 2,), (3, n // 2 + 1), (n - 1,), (n // 7, n // 7, n // 5, n // 3)]
    shards = [Shards(initial(n), bounds=bounds, decay_intervals=decay) for bounds in splits]
    for grad in grads:
        for shard in shards:
            shard.update(grad, 0.01, grad_scale=1 / 57)
    assert {shard.bits() for shard in shards} == {shards[0].bits()}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_parameters_are_the_rounded_master(dtype):
    n = BLOCK + 1009
    shard = Shards(initial(n), param_dtype=dtype)
    for grad in gradients(n, steps=3):
        shard.update(grad, 0.01)
        assert shard.param.tobytes() == shard.master.astype(dtype).tobytes()


@pytest.mark.parametrize("n", [57, 2 * BLOCK + 57])
def test_only_the_given_intervals_decay(n):
    intervals = [(0, 5), (7, 8), (20, n - 9)]  # the last one crosses block borders
    some, everything, none = (
        Shards(initial(n), decay_intervals=intervals),
        Shards(initial(n)),
        Shards(initial(n), weight_decay=0.0),
    )
    for grad in gradients(n, steps=3):
        for shard in (some, everything, none):
            shard.update(grad, 0.1)
    decays = np.zeros(n, dtype=bool)
    for start, stop in intervals:
        decays[start:stop] = True
    np.testing.assert_array_equal(some.master, np.where(decays, everything.master, none.master))
    assert (everything.master != none.master).any()


def test_the_gradient_is_scaled_and_left_alone():
    scaled, plain = Shards(initial(1009)), Shards(initial(1009))
    grad = gradients(1009)[0]
    before = grad.copy()
    scaled.update(grad, 0.01, grad_scale=0.125)  # a power of two: exact
    plain.update(grad * np.float32(0.125), 0.01)
    assert scaled.bits() == plain.bits()
    np.testing.assert_array_equal(grad, before)


def test_a_gradient_that_is_not_finite_spoils_its_own_element_without_a_warning():
    shard, clean = Shards(initial(57)), Shards(initial(57))
    grad = gradients(57)[0]
    bad = grad.copy()
    bad[[3, 50]] = np.nan, 3e38  # the square of the second overflows
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard.update(bad, 0.01)
        clean.update(grad, 0.01)
    others = np.delete(np.arange(57), [3, 50])
    assert np.isnan(shard.master[3])
    assert np.isnan(shard.param[3])
    assert np.isinf(shard.v[50])
    np.testing.assert_array_equal(shard.master[others], clean.master[others])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", 0.0),
        ("weight_decay", -1.0),
        ("eps", float("nan")),
        ("beta1", float("nan")),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}: found"):
        AdamWOptions(**{field: value})


@given(st.lists(st.integers(0, 60), max_size=12, unique=True), st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_cut_as_a_mask_would_cut_them(bounds, low, high):
    bounds = sorted(bounds)
    intervals = list(zip(bounds[::2], bounds[1::2], strict=False))
    low, high = min(low, high), max(low, high)
    mask = np.zeros(61, dtype=bool)
    for start, stop in intervals:
        mask[start:stop] = True
    cut = np.zeros(high - low, dtype=bool)
    for start, stop in intervals_within(intervals, low, high):
        assert start < stop
        cut[start:stop] = True
    np.testing.assert_array_equal(cut, mask[low:high])


def assert_cast_is_astype(bits: np.ndarray, block: int = 1 << 16) -> None:
    """float32 bit patterns [n]; the cast sees them in blocks, of which those without huge values take the fast way."""
    cast, out = Float16Cast(block), np.empty(block, np.float16)
    for low in range(0, bits.size, block):
        source = bits[low : low + block].view(np.float32)
        with np.errstate(all="ignore"):
            cast(source, out[: source.size])
            expected = source.astype(np.float16)
        differ = np.flatnonzero(out[: source.size].view(np.uint16) != expected.view(np.uint16))
        assert differ.size == 0, f"{source[differ[:3]]} -> {out[differ[:3]]}, astype {expected[differ[:3]]}"


def test_the_float16_cast_has_the_bits_of_astype_for_every_class_of_float32():
    """All 2^19 signs, exponents and leading 10 mantissa bits, times all that the 13 bits below can mean.

    What follows float16's last bit matters only by being zero, below, at or above one half; for subnormal results the
    last bit lies among the 10 leading ones and what follows only by being zero or not. In ascending order and in
    blocks of half a binade, so that each class has blocks of its own.
    """
    tails = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF], dtype=np.uint32)
    heads = np.arange(1 << 19, dtype=np.uint32) << np.uint32(13)
    assert_cast_is_astype((heads[:, None] + tails).reshape(-1), block=512 * tails.size)


def test_the_float16_cast_is_right_when_one_block_holds_all_classes():
    special = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x477FF000, 0x477FEFFF], np.uint32)
    noise = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    small = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32).view(np.uint32)
    for n in (0, 1, 7, 57, 1009):
        assert_cast_is_astype(small[:n])
        assert_cast_is_astype(np.concatenate([small[:n], special]))
    assert_cast_is_astype(np.concatenate([noise, small]))


@pytest.mark.skipif("EXHAUSTIVE" not in os.environ, reason="all 2^32 inputs take minutes: set EXHAUSTIVE=1")
def test_the_float16_cast_has_the_bits_of_astype_for_all_float32():
    low = np.arange(1 << 16, dtype=np.uint32)
    for high in range(1 << 16):
        assert_cast_is_astype((np.uint32(high) << np.uint32(16)) + low)
