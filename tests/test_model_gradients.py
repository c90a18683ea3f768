"""The gradients of MiniGPT against finite differences and against PyTorch."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt.model import MiniGPT, ModelConfig

REFERENCE = Path(__file__).parent / "reference"
ODD = ModelConfig(n_layer=2, n_embd=15, n_head=3, vocab_size=57, seq_len=7)
LONG = ModelConfig(n_layer=1, n_embd=6, n_head=2, vocab_size=11, seq_len=130)  # three blocks of queries, the last of 2


def random_problem(config, batch, seed=3, spread=0.3):
    """Parameters [P] float64 without zeros or ones, tokens and targets [batch, T]."""
    rng = np.random.default_rng(seed)
    params = rng.normal(0.0, spread, config.num_params)
    for p in config.parameters():
        params[p.start : p.stop] += p.init_mean
    tokens, targets = rng.integers(0, config.vocab_size, (2, batch, config.seq_len))
    return params, tokens, targets


def gradients(config, params, tokens, targets, dtype):
    grads = np.full(config.num_params, np.nan, dtype)
    loss = MiniGPT(config, len(tokens), dtype).loss_and_gradients(params, tokens, targets, grads)
    return loss, grads


def relative_errors(config, grads, expected):
    """For each parameter, the largest error over the largest expected value."""
    parts = {p.name: slice(p.start, p.stop) for p in config.parameters()}
    return {name: np.abs(grads[s] - expected[s]).max() / np.abs(expected[s]).max() for name, s in parts.items()}


@pytest.mark.parametrize(
    ("config", "batch", "spread"),
    [(ODD, 3, 0.3), (LONG, 2, 0.3), (ODD, 1, 6.0), (ModelConfig(1, 1, 1, 2, 1), 2, 0.5)],
    ids=["odd", "long", "large weights", "all ones"],
)
def test_gradients_equal_central_differences_in_float64_for_every_parameter(config, batch, spread):
    """Along a random direction and along the steepest element of each parameter.

    The error is below 1e-6 of the parameter's largest derivative, plus the rounding of the two losses, eps * loss / h.
    """
    params, tokens, targets = random_problem(config, batch, spread=spread)
    _, grads = gradients(config, params, tokens, targets, np.float64)
    model, rng, h = MiniGPT(config, batch, np.float64), np.random.default_rng(0), 1e-6
    for p in config.parameters():
        part = grads[p.start : p.stop]
        steepest = np.zeros(p.size)
        steepest[np.abs(part).argmax()] = 1.0
        for direction in (steepest, rng.normal(size=p.size)):
            shift = np.zeros(config.num_params)
            shift[p.start : p.stop] = direction
            up, down = (model.loss(params + sign * h * shift, tokens, targets) for sign in (1, -1))
            tolerance = 1e-6 * np.abs(part).max() * np.abs(direction).sum() + np.finfo(np.float64).eps * up / h
            assert abs((up - down) / (2 * h) - part @ direction) < tolerance, p.name


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-6), (np.float64, 1e-13)])
def test_gradients_equal_the_committed_reference_of_pytorch(dtype, tolerance):
    reference = np.load(REFERENCE / "minigpt_gradients.npz", allow_pickle=False)
    fields = ("n_layer", "n_embd", "n_head", "vocab_size", "seq_len")
    config = ModelConfig(**{name: int(reference[name]) for name in fields})
    loss, grads = gradients(config, reference["params"], reference["tokens"], reference["targets"], dtype)
    assert loss == pytest.approx(float(reference["loss"]), rel=tolerance)
    errors = relative_errors(config, grads, reference["grads"])
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize(
    ("config", "batch"), [(ModelConfig(), 4), (ODD, 1), (LONG, 3)], ids=["defaults", "odd", "long"]
)
def test_gradients_equal_those_of_pytorch_on_the_same_weights(config, batch):
    torch = pytest.importorskip("torch", reason="live comparison needs the extra `torch`")
    reference = runpy.run_path(str(REFERENCE / "make_reference.py"))
    sizes = {name: getattr(config, name) for name in reference["SIZES"]}
    params = reference["random_parameters"](sizes, seed=5)
    _, tokens, targets = random_problem(config, batch)
    expected_loss, expected = reference["loss_and_gradients"](sizes, params, tokens, targets, torch.float64)
    for dtype, tolerance in ((np.float32, 5e-6), (np.float64, 1e-12)):
        loss, grads = gradients(config, params, tokens, targets, dtype)
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        errors = relative_errors(config, grads, expected)
        assert max(errors.values()) < tolerance, errors


def test_the_loss_of_fresh_parameters_is_that_of_a_uniform_guess():
    config = ModelConfig()
    model = MiniGPT(config, 4)
    _, tokens, targets = random_problem(config, 4)
    loss = model.loss(model.initial_parameters(0), tokens, targets)
    assert loss / tokens.size == pytest.approx(np.log(config.vocab_size), rel=0.01)
