"""When a save is due: parsed strictly, the interval that loses the least time, and one clock that decides for all."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from mpi_ckpt import Checkpointer, PerRank
from mpi_ckpt.checkpoint.cadence import Cadence, optimal_interval, parse_duration


def test_every_names_steps_or_a_duration_or_auto():
    assert Cadence.parse("500steps") == Cadence(steps=500)
    assert Cadence.parse("1step") == Cadence.parse(" 1 steps ") == Cadence(steps=1)
    for text, seconds in {"30s": 30, "1.5min": 90, "2h": 7200, "1d": 86400, "0.5 s": 0.5, "10sec": 10}.items():
        assert Cadence.parse(text) == Cadence(seconds=seconds)
    assert Cadence.parse("auto", "4h") == Cadence(mean_time_between_failures=14400)
    assert Cadence.parse(None) == Cadence()


@pytest.mark.parametrize(
    "every",
    [*("", " ", "10", "steps", "0steps", "-5steps", "1.5steps", "0s", "-1s", "1e3s", "inf s", "nans", "10 minutes"),
     *("10m", "s", "min10", "10min 5s", "AUTO", "10 S", "10,5s", 10, 1.5, True, ["10s"])],
)  # fmt: skip
def test_anything_else_is_refused_with_what_was_found_and_what_is_expected(every):
    with pytest.raises(ValueError, match=r"^every: found ") as caught:
        Cadence.parse(every)
    assert repr(every) in str(caught.value)
    assert "'10min'" in str(caught.value)


def test_the_mean_time_between_failures_is_checked_by_its_own_name():
    for wrong in ("soon", "0s", "-1d", "10", 5, None):
        with pytest.raises(ValueError, match=r"^mean_time_between_failures: found"):
            Cadence.parse("auto", wrong)
    assert parse_duration("x", "90s") == 90


def test_steps_are_due_by_number_and_durations_by_the_clock():
    steps, timed, auto, never = (Cadence.parse(every) for every in ("10steps", "10s", "auto", None))
    assert [step for step in range(1, 31) if steps.due(step, math.inf, None)] == [10, 20, 30]
    assert [timed.due(1, elapsed, None) for elapsed in (0.0, 9.99, 10.0, 1e9)] == [False, False, True, True]
    assert not never.due(10, 1e9, 1.0)
    wait = optimal_interval(2.0, 86400.0)
    assert [auto.due(1, elapsed, 2.0) for elapsed in (0.9 * wait, 1.1 * wait)] == [False, True]
    assert auto.due(1, 3600.0, None), "the first save of all measures the cost; it does not wait for ever"
    assert [c.needs_clock for c in (steps, timed, auto, never)] == [False, True, True, False]


def expected_seconds(interval: np.ndarray, cost: float, mean: float) -> np.ndarray:
    """Run time over useful time, with exponential failures: M (exp((t + C) / M) - 1) / t.

    Daly (2006), eq. 20, without the restart time, which only scales it: the exact model that eq. 37 approximates.
    """
    return mean * np.expm1((interval + cost) / mean) / interval


@pytest.mark.parametrize("cost", [0.01, 0.5, 2.0, 60.0, 600.0])
@pytest.mark.parametrize("mean", [600.0, 3600.0, 86400.0, 30 * 86400.0])
def test_the_interval_of_auto_is_the_minimum_of_the_exact_cost_model(cost, mean):
    grid = np.geomspace(cost / 100, 20 * mean, 400_001)
    loss = expected_seconds(grid, cost, mean)
    best = grid[np.argmin(loss)]
    chosen = optimal_interval(cost, mean)
    assert expected_seconds(np.array(chosen), cost, mean) <= loss.min() * (1 + 1e-3)
    if cost < mean / 10:
        assert chosen == pytest.approx(best, rel=0.01)
    if cost < mean / 1000:
        assert chosen == pytest.approx(math.sqrt(2 * cost * mean), rel=0.05), "Young (1974)"


def test_the_interval_grows_with_cost_and_mean_time_and_is_always_positive():
    for mean in (1.0, 100.0, 1e6):
        costs = np.geomspace(1e-6 * mean, 100 * mean, 500)
        waits = np.array([optimal_interval(cost, mean) for cost in costs])
        assert (waits > 0).all()
        assert np.isfinite(waits).all()
        assert (np.diff(waits[costs < mean / 2]) > 0).all()
        assert (waits[costs > 2 * mean] == mean).all()
    assert optimal_interval(0.0, 3600.0) == 0.0


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_one_clock_decides_for_all_however_the_others_are_skewed(comm, shared_path, monkeypatch):
    real = time.monotonic
    skew = [0.0, 1e6, -1e6][comm.rank]
    saved: dict[str, list[int]] = {}
    for every in ("3600s", "0.2s", "auto", "2steps"):
        monkeypatch.setattr(time, "monotonic", real)
        with Checkpointer(shared_path / every, comm, every=every, keep=None) as checkpointer:
            monkeypatch.setattr(time, "monotonic", lambda: real() + skew)  # since the checkpointer began
            done = []
            for step in range(1, 9):
                if comm.rank == 0:
                    time.sleep(0.05)  # the others come early
                if checkpointer.save_if_due(step, {"n": step, "own": PerRank(comm.rank)}):
                    done.append(step)
            checkpointer.wait_until_finished()
            saved[every] = checkpointer.all_steps()
            assert comm.allgather(done) == [saved[every]] * comm.size
    assert saved["3600s"] == saved["auto"] == []
    assert 1 <= len(saved["0.2s"]) < 8
    assert saved["2steps"] == [2, 4, 6, 8]
