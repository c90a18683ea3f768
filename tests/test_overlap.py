"""Gradients summed while the backward runs: the right sums, of final values, with the same bits every time."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt.layout import shard_range
from mpi_ckpt.model import MiniGPT, ModelConfig
from mpi_ckpt.parallel.buckets import OverlappedReduction
from mpi_ckpt.parallel.zero import ZeroOptimizer
from tests.ranks import same_everywhere

CONFIG = ModelConfig()


def problem(batch: int):
    rng = np.random.default_rng(batch)
    params = rng.normal(0, 0.1, CONFIG.num_params).astype(np.float32)
    return params, *rng.integers(0, CONFIG.vocab_size, (2, batch, CONFIG.seq_len))


# -- the hook ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_intervals_are_reported_from_the_last_to_the_first_and_are_final(batch, accumulate):
    params, tokens, targets = problem(batch)
    grads = np.full(CONFIG.num_params, 0.5, np.float32)
    reported = []
    MiniGPT(CONFIG, 3).loss_and_gradients(
        params, tokens, targets, grads, accumulate, lambda a, b: reported.append((a, b, grads[a:b].copy()))
    )
    starts = {p.name: p.start for p in CONFIG.parameters()}
    bounds = [0, *(starts[f"blocks.{i}.ln1.weight"] for i in range(CONFIG.n_layer)), starts["ln_f.weight"]]
    expected = list(itertools.pairwise([*bounds, CONFIG.num_params]))
    assert [(a, b) for a, b, _ in reported] == expected[::-1]
    for a, b, then in reported:
        assert then.tobytes() == grads[a:b].tobytes(), (a, b)


def test_a_hook_does_not_change_a_bit():
    params, tokens, targets = problem(3)
    plain, hooked = np.empty((2, CONFIG.num_params), np.float32)
    MiniGPT(CONFIG, 3).loss_and_gradients(params, tokens, targets, plain)
    MiniGPT(CONFIG, 3).loss_and_gradients(params, tokens, targets, hooked, on_gradients_ready=lambda a, b: None)
    assert plain.tobytes() == hooked.tobytes()


# -- the sums ----------------------------------------------------------------------------------------------------------


def counts_of(numel: int, comm) -> list[int]:
    return [b - a for a, b in (shard_range(numel, comm.size, r) for r in range(comm.size))]


@pytest.mark.mpi(ranks=[1, 2, 3, 4], timeout=60, unit="s")
def test_any_buckets_give_each_rank_the_exact_sum_of_its_interval_round_after_round(comm):
    for numel, bucket in itertools.product((1, 3, 57, 1009, 30_080), (1, 100, 5000, 1 << 18)):
        counts = counts_of(numel, comm)
        start, stop = shard_range(numel, comm.size, comm.rank)
        flat, out = np.empty(numel, np.float32), np.full(stop - start, np.nan, np.float32)
        reduction = OverlappedReduction(comm, flat, counts, out, bucket)
        for round_ in range(3):
            rng = np.random.default_rng([numel, round_])  # the same cuts on all ranks
            cuts = sorted({0, numel, *rng.integers(0, numel + 1, 4).tolist()}, reverse=True)
            values = np.random.default_rng([numel, round_]).integers(-99, 100, (comm.size, numel)).astype(np.float32)
            flat.fill(np.nan)
            for high, low in itertools.pairwise(cuts if round_ else cuts[:2]):  # what is not reported is summed, too
                flat[low:high] = values[comm.rank, low:high]
                reduction.ready(low, high)
            flat[:] = values[comm.rank]
            reduction.finish()
            np.testing.assert_array_equal(out, values.sum(axis=0)[start:stop])


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_the_first_buckets_are_summed_before_the_last_gradients_are_there(comm):
    """Every rank reports the upper half; its owner has the sum although nobody has reported the rest."""
    numel = 3000
    start, stop = shard_range(numel, comm.size, comm.rank)
    flat, out = np.full(numel, comm.rank + 1.0, np.float32), np.zeros(stop - start, np.float32)
    reduction = OverlappedReduction(comm, flat, counts_of(numel, comm), out, bucket=500)
    reduction.ready(1500, 3000)
    deadline = time.monotonic() + 50
    while comm.rank == 2 and not (out == 6.0).all():
        reduction.ready(1500, 1500)  # nothing more is ready, but messages advance
        assert time.monotonic() < deadline, "the sum did not come"
    comm.Barrier()
    reduction.finish()
    assert (out == 6.0).all()


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_intervals_out_of_order_are_refused(comm):
    flat = np.zeros(100, np.float32)
    reduction = OverlappedReduction(comm, flat, counts_of(100, comm), np.zeros(50, np.float32))
    reduction.ready(80, 100)
    for interval in ((0, 100), (60, 70), (80, 100), (90, 80), (-1, 80)):
        with pytest.raises(ValueError, match=r"expected one that ends at 80"):
            reduction.ready(*interval)
    reduction.ready(10, 80)
    reduction.finish()


def overlapped(comm, seed: int, *, delays: bool, overlap: bool = True) -> bytes:
    """My master after three steps of gradients that round, reported in four intervals."""
    numel = 700_001
    zero = ZeroOptimizer(comm, np.zeros(numel, np.float32), overlap=overlap)
    for step in range(3):
        zero.grads[:] = np.random.default_rng([comm.rank, step, seed]).standard_normal(numel)
        for high, low in itertools.pairwise((numel, 400_000, 390_000, 5_000, 0)):
            if delays:
                time.sleep(float(np.random.default_rng().random()) * 0.01)
            zero.gradients_ready(low, high)
        zero.apply(0.01, 1 / zero.reduce_gradients(16, 1.0).tokens)
    return zero.master.tobytes()


@pytest.mark.mpi(ranks=[2, 4], timeout=120, unit="s")
def test_the_bits_of_overlapped_sums_do_not_depend_on_when_the_ranks_arrive(comm):
    first = overlapped(comm, 1, delays=False)
    for _ in range(4):
        assert overlapped(comm, 1, delays=True) == first
    plain = np.frombuffer(overlapped(comm, 1, delays=False, overlap=False), np.float32)
    np.testing.assert_allclose(plain, np.frombuffer(first, np.float32), rtol=1e-4, atol=1e-5)
    if comm.size == 2:  # a + b is b + a: only more ranks have orders to differ in
        assert plain.tobytes() == first


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_the_optimizer_sums_what_was_not_reported_too_and_replicas_stay_equal(comm):
    zero = ZeroOptimizer(comm, np.ones(57, np.float32), overlap=True)
    zero.grads[:] = comm.rank
    zero.gradients_ready(20, 57)
    result = zero.step(0.01, 16, 1.0)
    same_everywhere(comm, (result, zero.params.tobytes()))
    assert result.grad_norm == pytest.approx(3 * np.sqrt(57) / 48)
    assert 0 < zero.communication_seconds < 60


# -- the program -------------------------------------------------------------------------------------------------------

HARD = ("--token-noise", "0.1", "--grad-accum", "3", "--global-batch", "13", "--ckpt-every", "3steps", "--steps", "9")


def losses(run_dir: Path) -> list[str]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"].hex() for row in lines if "event" not in row]


def test_an_overlapped_run_resumes_to_the_same_bits_and_stays_overlapped(launch):
    """With accumulation, noise and tensor ranks."""
    mesh = "--tensor-parallel", "2", "--n-layer", "3"
    launch.train(4, "--run-dir", "whole", "--overlap", *mesh, *HARD).check()
    launch.train(4, "--run-dir", "run", "--overlap", *mesh, *HARD, "--stop-at", "5").check()
    refused = launch.train(4, "--run-dir", "run", "--no-overlap", *mesh, *HARD)
    assert refused.status == 2
    assert "overlap is not what this run was started with" in refused.stderr
    launch.train(4, "--run-dir", "run", *mesh, *HARD).check()  # stored with the run
    assert losses(launch.cwd / "run") == losses(launch.cwd / "whole")
