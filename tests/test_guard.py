"""The guard's decisions: numbers in, the same decision out on every rank."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_ckpt.train.guard import LARGEST_NORM, Guard, choose_target, merged

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(NAN, 1.0), (INF, 1.0), (-INF, 1.0), (1.0, NAN), (1.0, INF), (NAN, NAN), (1.0, 1e20)]
)
def test_what_is_not_finite_is_rejected_from_the_first_step_on(loss, grad_norm):
    assert Guard().judge(loss, grad_norm, 2.0) == "non-finite"
    assert Guard(losses=[1.0] * 20).judge(loss, grad_norm, INF) == "non-finite"


def test_a_gradient_that_is_accepted_has_a_finite_square_in_float32():
    largest = np.float32(math.nextafter(LARGEST_NORM, 0.0))
    assert Guard().judge(1.0, float(largest), 2.0) is None
    assert np.isfinite(largest * largest)
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.float32(LARGEST_NORM * 1.001) ** 2)


def test_a_spike_is_above_twice_the_median_and_half_a_nat_above_it():
    guard = Guard(losses=[2.0, 9.0, 2.0, 2.0, 2.0])  # one large loss does not move the median
    assert guard.judge(4.0, 1.0, 2.0) is None
    assert guard.judge(4.0001, 1.0, 2.0) == "spike"
    assert guard.judge(4.0001, 1.0, 3.0) is None
    small = Guard(losses=[0.1] * 5)
    assert small.judge(0.59, 1.0, 2.0) is None, "six times the median, but near it"
    assert small.judge(0.61, 1.0, 2.0) == "spike"


def test_before_five_accepted_losses_nothing_is_a_spike():
    assert Guard(losses=[1.0] * 4).judge(1e9, 1.0, 2.0) is None
    assert Guard(losses=[1.0] * 5).judge(1e9, 1.0, 2.0) == "spike"


def test_only_the_last_twenty_accepted_losses_count():
    guard = Guard()
    for loss in [100.0] * 30 + [1.0] * 20:
        guard.accept(loss)
    assert guard.losses == [1.0] * 20
    assert guard.judge(2.5, 1.0, 2.0) == "spike"


def test_it_comes_back_from_a_checkpoint_to_the_bit():
    losses = np.random.default_rng(0).random(20).tolist()
    guard = Guard(losses, [(80, 240), (400, 416)], 3, 10)
    assert Guard.from_json(json.loads(json.dumps(guard.to_json()))) == guard
    assert Guard.from_json(None) == Guard()  # of a run that is older than the guard


@pytest.mark.parametrize(
    ("committed", "last_target", "target"),
    [
        ([], None, 0),
        ([10], None, 10),
        ([5, 10, 15], None, 15),
        ([5, 10, 15], 15, 10),  # nothing newer was committed since: one step older
        ([5, 10], 10, 5),
        ([5], 5, 5),  # there is no older one
        ([5, 10, 15], 10, 15),  # a newer one was committed since
        ([0], 0, 0),
    ],
)
def test_the_target_is_the_newest_step_and_one_older_for_each_further_trip(committed, last_target, target):
    assert choose_target(committed, last_target) == target


def test_the_cursor_jumps_over_what_is_to_be_skipped():
    guard = Guard(skip=[(80, 240), (400, 416)])
    assert [guard.next_cursor(c) for c in (0, 64, 80, 96, 239, 240, 400, 416)] == [0, 64, 240, 240, 240, 240, 416, 416]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=8))
def test_skipped_intervals_are_a_sorted_disjoint_union(pairs):
    skip: list[tuple[int, int]] = []
    for first, length in pairs:
        skip = merged(skip, first, first + length)
    assert {i for a, b in skip for i in range(a, b)} == {i for a, n in pairs for i in range(a, a + n)}
    assert all(a < b for a, b in skip)
    assert all(before < first for (_, before), (first, _) in pairwise(skip)), "neighbours are made one"
