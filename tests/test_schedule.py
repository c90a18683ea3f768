"""Learning rates: those of torch's schedulers, a function of the step alone, and settings that a run keeps for good."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mpi_ckpt.train.config import EVAL_SAMPLES, ConfigError, Settings
from mpi_ckpt.train.schedule import learning_rate

STEPS = 60


def rates(settings: Settings, steps: int = STEPS) -> list[float]:
    return [learning_rate(settings, step) for step in range(1, steps + 1)]


def torch_rates(settings: Settings, steps: int = STEPS) -> list[float]:
    """The same from torch: a linear warm-up, then a constant or CosineAnnealingLR, which is held at its end."""
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=settings.lr)
    warmup, length = max(settings.warmup_steps, 1), (settings.lr_decay_steps or steps) - settings.warmup_steps
    rise = schedulers.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    if settings.lr_schedule == "constant":
        rest = schedulers.ConstantLR(optimizer, factor=1.0)
    else:
        rest = schedulers.CosineAnnealingLR(optimizer, T_max=length, eta_min=settings.lr_min)
    # Step w, the last of the warm-up, is the first of the cosine; without a warm-up the cosine began at "step 0".
    whole = schedulers.SequentialLR(optimizer, [rise, rest], [warmup - 1]) if settings.warmup_steps else rest
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no optimizer step was made; and SequentialLR warns about itself
            whole.step()
    found = found[:steps] if settings.warmup_steps else found[1:]
    if settings.lr_schedule == "cosine":  # torch's goes up again
        found[settings.lr_decay_steps - 1 :] = [settings.lr_min] * (steps - settings.lr_decay_steps + 1)
    return found


@pytest.mark.parametrize("warmup", [0, 1, 2, 7])
@pytest.mark.parametrize(("decay", "lowest"), [(60, 0.0), (60, 1e-4), (40, 3e-3), (8, 1e-5)])
def test_a_cosine_has_the_rates_of_torch(warmup, decay, lowest):
    settings = Settings(lr_schedule="cosine", warmup_steps=warmup, lr_decay_steps=decay, lr_min=lowest)
    assert rates(settings) == pytest.approx(torch_rates(settings), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
def test_a_constant_rate_with_a_warm_up_has_the_rates_of_torch(warmup):
    settings = Settings(warmup_steps=warmup)
    assert rates(settings) == pytest.approx(torch_rates(settings), rel=1e-12)


def test_without_a_schedule_every_step_has_the_rate_that_was_given():
    assert set(rates(Settings(lr=3e-3))) == {3e-3}


@given(st.integers(0, 200), st.integers(1, 2000), st.floats(0, 1), st.floats(1e-9, 1e3))
@hypothesis_settings(max_examples=100, deadline=None)
def test_the_rate_rises_to_lr_then_falls_to_lr_min_and_stays(warmup, length, fraction, lr):
    lowest = fraction * lr
    settings = Settings(lr=lr, lr_schedule="cosine", warmup_steps=warmup, lr_decay_steps=warmup + length, lr_min=lowest)
    found = rates(settings, warmup + length + 5)
    tolerance = 1e-12 * lr
    assert max(found) <= lr + tolerance
    assert all(a < b + tolerance for a, b in pairwise(found[:warmup]))
    assert all(a >= b - tolerance for a, b in pairwise(found[warmup:]))
    assert found[warmup + length - 1 :] == [lowest] * 6
    if warmup:
        assert found[warmup - 1] == pytest.approx(lr)
        assert found[0] == pytest.approx(lr / warmup)


def test_the_cosine_is_halfway_down_in_the_middle_and_ends_at_a_tenth_unless_told_otherwise():
    settings = Settings(lr=1.0, lr_schedule="cosine", warmup_steps=10, lr_decay_steps=30)
    assert learning_rate(settings, 20) == pytest.approx(0.55)
    assert learning_rate(settings, 15) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(settings, 30) == learning_rate(settings, 10**6) == 0.1


def test_the_first_launch_fixes_where_the_cosine_ends_and_what_is_held_out():
    cosine = Settings(lr_schedule="cosine")
    with pytest.raises(ValueError, match=r"lr_decay_steps: found None"):
        learning_rate(cosine, 1)
    assert cosine.completed(500, evaluates=False).lr_decay_steps == 500
    assert Settings(lr_schedule="cosine", lr_decay_steps=7).completed(500, evaluates=False).lr_decay_steps == 7
    assert Settings().completed(500, evaluates=False) == Settings()
    assert Settings().completed(500, evaluates=True).eval_samples == EVAL_SAMPLES
    assert Settings(eval_samples=3).completed(500, evaluates=True).eval_samples == 3


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("grad_accum", {"grad_accum": 0}),
        ("lr_schedule", {"lr_schedule": "linear"}),
        ("warmup_steps", {"warmup_steps": -1}),
        ("lr_min", {"lr_min": -1e-9}),
        ("lr_min", {"lr_min": 2.0}),
        ("lr_min", {"lr_min": math.nan}),
        ("lr_decay_steps", {"lr_decay_steps": 0}),
        ("lr_decay_steps", {"warmup_steps": 20, "lr_decay_steps": 20}),
        ("decay", {"decay": "biases"}),
        ("clip_norm", {"clip_norm": -1.0}),
        ("clip_norm", {"clip_norm": math.nan}),
        ("clip_norm", {"clip_norm": math.inf}),
        ("eval_samples", {"eval_samples": -1}),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(field, changes):
    with pytest.raises(ConfigError, match=f"{field} cannot be used; found .*; expected"):
        Settings(**changes)


def test_a_warm_up_longer_than_the_run_is_refused_with_a_cosine():
    with pytest.raises(ConfigError, match="lr_decay_steps cannot be used"):
        Settings(lr_schedule="cosine", warmup_steps=100).completed(20, evaluates=False)


def test_settings_come_back_from_json_and_those_of_an_older_run_keep_its_rules():
    settings = Settings(lr_schedule="cosine", warmup_steps=3, grad_accum=2, eval_samples=5, clip_norm=0.5, lr_min=0.0)
    assert Settings.from_json(settings.to_json()) == settings
    new = {"grad_accum", "lr_schedule", "warmup_steps", "lr_min", "lr_decay_steps", "decay", "clip_norm"}
    old = Settings.from_json({k: v for k, v in Settings().to_json().items() if k not in new | {"eval_samples"}})
    assert (old.decay, old.clip_norm, old.grad_accum, old.eval_samples) == ("all", 0.0, 1, 0)
    assert set(rates(old)) == {old.lr}
