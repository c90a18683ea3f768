"""What a caller of MiniGPT relies on: dtypes, batch sizes, exact repetition, quiet NaN, clear errors, steady memory."""

import math
import resource
import tracemalloc
import warnings

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mpi_ckpt.model import MiniGPT, ModelConfig
from mpi_ckpt.model.half import CHUNK, cast_up

ODD = ModelConfig(n_layer=2, n_embd=15, n_head=3, vocab_size=57, seq_len=7)


def problem(batch, config=ODD, seed=0):
    rng = np.random.default_rng(seed)
    params = rng.normal(0, 0.1, config.num_params).astype(np.float32)
    tokens, targets = rng.integers(0, config.vocab_size, (2, batch, config.seq_len))
    return params, tokens, targets


def run(model, params, tokens, targets, **options):
    grads = np.full(model.config.num_params, 3.0, np.float32)
    return model.loss_and_gradients(params, tokens, targets, grads, **options), grads


@pytest.mark.parametrize("batch", [1, 3])
def test_the_result_does_not_depend_on_the_size_of_the_workspace_nor_on_what_it_held(batch):
    params, tokens, targets = problem(batch)
    exact, larger = MiniGPT(ODD, batch), MiniGPT(ODD, 4)
    run(larger, *problem(4, seed=1))
    expected_loss, expected = run(exact, params, tokens, targets)
    loss, grads = run(larger, params, tokens, targets)
    assert loss == expected_loss
    assert grads.tobytes() == expected.tobytes()


def test_the_result_does_not_depend_on_where_the_vectors_lie_in_memory():
    """A resumed process gets other addresses, and must continue with the same bits."""
    params, tokens, targets = problem(3)
    expected_loss, expected = run(MiniGPT(ODD, 3), params, tokens, targets)
    for offset in range(1, 16):
        moved, grads = np.empty((2, ODD.num_params + offset), np.float32)
        moved, grads = moved[offset:], grads[offset:]
        moved[:] = params
        assert MiniGPT(ODD, 3).loss_and_gradients(moved, tokens, targets, grads) == expected_loss
        assert grads.tobytes() == expected.tobytes()


def test_two_calls_give_the_same_bits_and_forward_alone_the_same_loss():
    model, (params, tokens, targets) = MiniGPT(ODD, 3), problem(3)
    first_loss, first = run(model, params, tokens, targets)
    loss, grads = run(model, params, tokens, targets)
    assert first_loss == loss == model.loss(params, tokens, targets)
    assert first.tobytes() == grads.tobytes()


def test_the_loss_is_a_sum_over_sequences():
    model, (params, tokens, targets) = MiniGPT(ODD, 3), problem(3)
    parts = [model.loss(params, tokens[i : i + 1], targets[i : i + 1]) for i in range(3)]
    assert model.loss(params, tokens, targets) == pytest.approx(sum(parts), rel=1e-6)


def test_accumulating_equals_the_sum_of_two_gradients():
    model, a, b = MiniGPT(ODD, 3), problem(3), problem(2, seed=1)
    params = a[0]
    _, first = run(model, *a)
    _, second = run(model, params, *b[1:])
    accumulated = first.copy()
    loss = model.loss_and_gradients(params, *b[1:], accumulated, accumulate=True)
    assert loss == model.loss(params, *b[1:])
    assert accumulated.tobytes() == (first + second).tobytes()


def test_float16_parameters_give_the_gradient_of_the_same_values_in_float32():
    model, (params, tokens, targets) = MiniGPT(ODD, 3), problem(3)
    half = params.astype(np.float16)
    expected_loss, expected = run(model, half.astype(np.float32), tokens, targets)
    loss, grads = run(model, half, tokens, targets)
    assert loss == expected_loss
    assert grads.tobytes() == expected.tobytes()


@pytest.mark.parametrize("special", [np.float16(1), np.float16(np.inf)], ids=["finite chunks", "chunks with infinity"])
def test_the_cast_of_float16_is_exact_for_every_bit_pattern(special):
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite, rest = patterns[np.isfinite(patterns)], patterns[~np.isfinite(patterns)]
    half = np.concatenate([np.resize(finite, CHUNK + 1009), rest, [special], finite[:7]]).astype(np.float16)
    single = np.full(len(half), 5.0, np.float32)
    cast_up(half, single)
    assert np.array_equal(single.view(np.uint32), half.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["wte.weight", "blocks.1.qkv.weight", "head.weight"])
def test_a_non_finite_parameter_comes_out_non_finite_without_a_warning(dtype, value, name):
    model, (params, tokens, targets) = MiniGPT(ODD, 3), problem(3)
    place = next(p for p in ODD.parameters() if p.name == name)
    params = params.astype(dtype)
    params[place.start : place.stop] = value
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        loss, grads = run(model, params, tokens, targets)
    assert not math.isfinite(loss)
    assert not np.isfinite(grads).all()
    params, *_ = problem(3)
    assert np.isfinite(run(model, params, tokens, targets)[1]).all()  # and nothing of it stays behind


@pytest.mark.parametrize("capacity", [0, 4])
def test_no_sequences_give_no_loss_and_no_gradient(capacity):
    model, (params, tokens, targets) = MiniGPT(ODD, capacity), problem(0)
    loss, grads = run(model, params, tokens, targets)
    assert loss == model.loss(params, tokens, targets) == 0.0
    assert not grads.any()
    assert (run(model, params, tokens, targets, accumulate=True)[1] == 3.0).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64])
def test_any_integer_type_serves_for_token_ids(dtype):
    model, (params, tokens, targets) = MiniGPT(ODD, 3), problem(3)
    assert model.loss(params, tokens.astype(dtype), targets.astype(dtype)) == model.loss(params, tokens, targets)


@pytest.mark.parametrize("which", ["tokens", "targets"])
@pytest.mark.parametrize("bad", [57, -1, 2**62, 2**64 - 1])
def test_a_token_outside_the_vocabulary_is_refused_by_place_and_value(which, bad):
    params, tokens, targets = problem(3)
    ids = {"tokens": tokens, "targets": targets}
    ids[which] = ids[which].astype(np.uint64 if bad > 2**63 else np.int64)
    ids[which][2, 5] = bad
    model, grads = MiniGPT(ODD, 4), np.full(ODD.num_params, 3.0, np.float32)
    with pytest.raises(ValueError, match=rf"^{which}\[2, 5\]: found id {bad}, expected 0 to 56$"):
        model.loss_and_gradients(params, ids["tokens"], ids["targets"], grads)
    assert (grads == 3.0).all()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            np.zeros((3, 8), np.int64),
            r"tokens: found shape \(3, 8\), dtype int64; expected integers \[b, 7\] with b at",
        ),
        (np.zeros((5, 7), np.int64), r"tokens: found shape \(5, 7\), dtype int64; .* b at most 4"),
        (np.zeros(7, np.int64), r"tokens: found shape \(7,\)"),
        (np.zeros((3, 7), np.float32), r"tokens: found shape \(3, 7\), dtype float32"),
        (np.zeros((2, 7), np.int64), "targets: found 3 sequences, expected 2 as in tokens"),
    ],
)
def test_tokens_of_another_shape_or_type_are_refused(tokens, message):
    params, _, targets = problem(3)
    with pytest.raises(ValueError, match=message):
        MiniGPT(ODD, 4).loss(params, tokens, targets)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(ODD.num_params - 1, np.float32),
        np.zeros((1, ODD.num_params), np.float32),
        np.zeros(ODD.num_params, np.int32),
        np.zeros(ODD.num_params, ">f4"),
        np.zeros(ODD.num_params, np.float64),
        np.zeros(2 * ODD.num_params, np.float32)[::2],
    ],
    ids=["short", "two axes", "integers", "big-endian", "float64", "strided"],
)
def test_vectors_of_another_shape_or_type_are_refused_by_name(wrong):
    params, tokens, targets = problem(3)
    model, good = MiniGPT(ODD, 3), np.zeros(ODD.num_params, np.float32)
    with pytest.raises(
        ValueError, match=r"^params: found shape .*expected a contiguous vector of 7635 elements, float16"
    ):
        model.loss_and_gradients(wrong, tokens, targets, good)
    with pytest.raises(
        ValueError, match=r"^grads: found shape .*expected a contiguous vector of 7635 elements, float32"
    ):
        model.loss_and_gradients(params, tokens, targets, wrong)


def test_gradients_of_a_float32_model_are_not_float16():
    params, tokens, targets = problem(3)
    with pytest.raises(ValueError, match=r"^grads: .*dtype <f2"):
        MiniGPT(ODD, 3).loss_and_gradients(params, tokens, targets, np.zeros(ODD.num_params, np.float16))


@pytest.mark.parametrize("options", [{"batch": -1}, {"batch": 2.0}, {"batch": 1, "dtype": np.float16}])
def test_a_model_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match=r"^(batch|dtype): found .*, expected"):
        MiniGPT(ODD, **options)


def test_another_vector_of_parameters_or_gradients_is_not_mistaken_for_the_last_one():
    model, (params, tokens, targets) = MiniGPT(ODD, 3), problem(3)
    _, first = run(model, params, tokens, targets)
    kept = first.copy()
    _, second = run(model, params * np.float32(1.5), tokens, targets)
    assert first.tobytes() == kept.tobytes() != second.tobytes()
    params *= np.float32(1.5)  # changed in place, as an optimizer does
    assert run(model, params, tokens, targets)[1].tobytes() == second.tobytes()


@pytest.fixture
def steady_step():
    """A step of a model whose smallest activation has 256 KiB and largest 1 MiB, after three steps to warm up."""
    config = ModelConfig(n_layer=1, n_embd=128, n_head=4, vocab_size=256, seq_len=128)
    model, (params, tokens, targets) = MiniGPT(config, 4), problem(4, config)
    half, grads = params.astype(np.float16), np.zeros(config.num_params, np.float32)

    def step():
        model.loss_and_gradients(half, tokens, targets, grads)
        model.loss_and_gradients(half, tokens[:3], targets[:3], grads, accumulate=True)

    with threadpool_limits(1):
        for _ in range(3):
            step()
        yield step


def test_a_steady_step_makes_almost_no_minor_page_faults(steady_step):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        steady_step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 50, f"{faults} minor page faults in 10 steps"


def test_a_steady_step_allocates_no_array_of_the_size_of_an_activation(steady_step):
    tracemalloc.start()  # NumPy reports its arrays to it
    try:
        steady_step()
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000  # half of it are the buffers of a reduction that casts
    assert current < 20_000
