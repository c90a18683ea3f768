"""ZeRO-1 on real ranks: any number of ranks makes the updates of one rank, and memory is what it says."""

from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest

from mpi_ckpt.comm.collectives import gather_rows
from mpi_ckpt.layout import shard_range
from mpi_ckpt.parallel.zero import ZeroOptimizer

SIZES = [1, 2, 3, 7, 57, 1009, 30_080]


def initial(numel: int) -> np.ndarray:
    return np.random.default_rng(numel).standard_normal(numel).astype(np.float32)


def integer_gradients(numel: int, ranks: int, step: int) -> np.ndarray:
    """float32 [ranks, P] of whole numbers: their sums are exact in any order."""
    return np.random.default_rng([numel, step]).integers(-99, 100, (ranks, numel)).astype(np.float32)


def tokens_of(rank: int) -> int:
    """Uneven: rank 0 has none."""
    return 16 * rank


def whole(comm, shard: np.ndarray) -> np.ndarray:
    return np.concatenate(comm.allgather(shard))


@pytest.mark.mpi(ranks=[1, 2, 3, 4, 8], timeout=60, unit="s")
def test_any_number_of_ranks_makes_the_updates_of_one(comm):
    from mpi4py import MPI

    for numel, dtype in itertools.product(SIZES, (np.float16, np.float32)):
        settings = {"param_dtype": dtype, "decay_intervals": [(0, numel // 3), (numel // 2, numel)]}
        zero = ZeroOptimizer(comm, initial(numel), **settings)
        alone = ZeroOptimizer(MPI.COMM_SELF, initial(numel), **settings)
        for step in range(1, 4):
            grads = integer_gradients(numel, comm.size, step)
            zero.grads[:] = grads[comm.rank]
            alone.grads[:] = grads.sum(axis=0)
            tokens = [tokens_of(r + 1) for r in range(comm.size)]
            result = zero.step(0.01, tokens[comm.rank], 2.0 * tokens[comm.rank])
            expected = alone.step(0.01, sum(tokens), 2.0 * sum(tokens))
            assert zero.params.tobytes() == alone.params.tobytes()
            assert (result.loss, result.param_norm) == (expected.loss, expected.param_norm)
            np.testing.assert_allclose(result.grad_norm, expected.grad_norm, rtol=1e-14)
        for name in ("master", "m", "v"):
            assert whole(comm, getattr(zero, name)).tobytes() == getattr(alone, name).tobytes()


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_ten_steps_follow_the_paper_in_float64(comm):
    """arXiv:1711.05101, Algorithm 2, on the mean gradient; only the given intervals decay."""
    numel, tokens, lr = 1009, 16 * comm.size, 0.01
    zero = ZeroOptimizer(comm, initial(numel), weight_decay=0.5, decay_intervals=[(0, 100), (300, 999)])
    decay = np.zeros(numel)
    decay[0:100] = decay[300:999] = 0.5
    theta, m, v = initial(numel).astype(np.float64), np.zeros(numel), np.zeros(numel)
    for t in range(1, 11):
        grads = integer_gradients(numel, comm.size, t)
        zero.grads[:] = grads[comm.rank]
        zero.step(lr, 16, 1.0)
        g = grads.sum(axis=0) / np.float64(tokens)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        theta -= lr * ((m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8) + decay * theta)
    np.testing.assert_allclose(whole(comm, zero.master), theta, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(zero.params, theta, rtol=1e-3, atol=1e-6)


@pytest.mark.mpi(ranks=[8], timeout=60, unit="s")
def test_optimizer_memory_is_twelve_bytes_an_element_of_the_shard(comm):
    for numel in SIZES:
        zero = ZeroOptimizer(comm, initial(numel))
        start, stop = shard_range(numel, comm.size, comm.rank)
        assert (zero.start, zero.stop) == (start, stop)
        assert zero.optimizer_bytes == 12 * (stop - start)
        assert comm.allreduce(zero.optimizer_bytes) == 12 * numel
        for array in (zero.params, zero.grads, zero.master, zero.m, zero.v):
            assert array.size == 0 or array.ctypes.data % 64 == 0, "not on a cache line"


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_only_rank_0_s_initial_parameters_count(comm):
    zero = ZeroOptimizer(comm, initial(1009) if comm.rank == 0 else np.full(1009, np.nan, dtype=np.float32))
    assert zero.params.tobytes() == initial(1009).astype(np.float16).tobytes()
    assert zero.master.tobytes() == initial(1009)[zero.start : zero.stop].tobytes()
    assert not zero.grads.any()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_means_are_over_the_tokens_of_all_ranks_however_they_share_them(comm):
    numel, ranks = 1009, comm.size
    zero = ZeroOptimizer(comm, initial(numel), weight_decay=0.0)
    grads = integer_gradients(numel, ranks, step=1)
    zero.grads[:] = grads[comm.rank]
    local = tokens_of(comm.rank)
    tokens = comm.allreduce(local)
    result = zero.step(0.01, local, 0.5 * local + comm.rank)
    mean = grads.sum(axis=0).astype(np.float64) / tokens
    assert result.loss == (0.5 * tokens + sum(range(ranks))) / tokens
    np.testing.assert_allclose(result.grad_norm, np.linalg.norm(mean), rtol=1e-14)
    np.testing.assert_allclose(whole(comm, zero.m), 0.1 * mean, rtol=1e-6)  # m = (1 - beta1) g after one step
    np.testing.assert_array_equal(zero.grads, grads[comm.rank], err_msg="the caller's gradients were changed")


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_replicas_and_their_norm_are_the_same_to_the_bit_on_all_ranks(comm):
    for numel in (3, 57, 70_001):
        zero = ZeroOptimizer(comm, initial(numel))
        for step in range(5):
            zero.grads[:] = np.random.default_rng([comm.rank, step]).standard_normal(numel)
            result = zero.step(0.01, 57, 1.0)
            assert result.param_norm == zero.replica_norm()
            assert len(set(comm.allgather((result, zero.params.tobytes())))) == 1
            exact = np.linalg.norm(zero.params.astype(np.float64))
            np.testing.assert_allclose(result.param_norm, exact, rtol=1e-13)


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_one_bad_gradient_element_on_one_rank_shows_in_every_rank_s_norm(comm):
    for bad, place in itertools.product((np.nan, np.inf), (0, 500, 1008)):
        zero = ZeroOptimizer(comm, initial(1009))
        if comm.rank == comm.size - 1:
            zero.grads[place] = bad
        assert not np.isfinite(zero.reduce_gradients(16, 1.0).grad_norm)
        assert zero.steps_taken == 0
        assert np.isfinite(zero.master).all(), "reducing changes no state"


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_step_restored_in_place_continues_to_the_same_bits(comm):
    def train(zero, steps):
        for step in steps:
            zero.grads[:] = np.random.default_rng([comm.rank, step]).standard_normal(1009)
            zero.step(0.01, 16, 1.0)

    straight, resumed = ZeroOptimizer(comm, initial(1009)), ZeroOptimizer(comm, initial(1009))
    train(straight, range(3))
    saved = {name: shard.array.copy() for name, shard in straight.state().items()}
    train(straight, range(3, 6))
    for array in (resumed.params, resumed.master, resumed.m, resumed.v):
        array.fill(np.nan)
    for name, shard in resumed.state().items():
        assert (shard.block.start, shard.block.shape, shard.shape) == (
            (resumed.start,),
            (resumed.stop - resumed.start,),
            (1009,),
        )
        shard.array[...] = saved[name]
    resumed.steps_taken = 3
    resumed.gather_parameters()
    train(resumed, range(3, 6))
    for name, shard in resumed.state().items():
        assert shard.array.tobytes() == straight.state()[name].array.tobytes()
    assert resumed.params.tobytes() == straight.params.tobytes()
    assert resumed.steps_taken == straight.steps_taken == 6


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_is_its_two_halves_and_the_scale_between_them_clips(comm):
    halves, step, clipped = (ZeroOptimizer(comm, initial(57)) for _ in range(3))
    grads = integer_gradients(57, comm.size, step=1)[comm.rank]
    halves.grads[:], step.grads[:], clipped.grads[:] = grads, grads, 4 * grads
    step.step(0.01, 16, 1.0)
    gradient = halves.reduce_gradients(16, 1.0)
    halves.apply(0.01, 1 / gradient.tokens)
    larger = clipped.reduce_gradients(16, 1.0)
    clipped.apply(0.01, gradient.grad_norm / larger.grad_norm / larger.tokens)
    assert halves.master.tobytes() == step.master.tobytes() == clipped.master.tobytes()


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_memory_is_the_buffers_and_a_constant_and_a_step_allocates_nothing_large(comm):
    numel = 1_000_003
    values = initial(numel)
    tracemalloc.start()
    zero = ZeroOptimizer(comm, values)
    held, peak = tracemalloc.get_traced_memory()
    mine = zero.stop - zero.start
    assert held == pytest.approx((2 + 4) * numel + 16 * mine, abs=2 << 20)
    assert peak - held < 100_000
    zero.step(0.01, 16, 1.0)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    zero.step(0.01, 16, 1.0)
    assert tracemalloc.get_traced_memory()[1] - before < 20_000
    tracemalloc.stop()


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_bad_arguments_are_refused_by_name_on_all_ranks_even_if_one_rank_alone_is_wrong(comm):
    last = comm.rank == comm.size - 1
    with pytest.raises(ValueError, match=r"initial: found lengths \[.*-1\] by rank"):
        ZeroOptimizer(comm, initial(57).astype(np.float64) if last else initial(57))
    with pytest.raises(ValueError, match=r"initial: found lengths \[57, .*58\] by rank"):
        ZeroOptimizer(comm, initial(58 if last else 57))
    zero = ZeroOptimizer(comm, initial(57))
    with pytest.raises(ValueError, match=r"tokens of each rank: found \[.*-1\.0\]"):
        zero.step(0.01, -1 if last else 16, 1.0)
    with pytest.raises(ValueError, match="expected none negative, some positive"):
        zero.step(0.01, 0, 1.0)
    assert gather_rows(comm, [zero.steps_taken]).sum() == 0
    with pytest.raises(ValueError, match=r"^param_dtype: found float64"):
        ZeroOptimizer(comm, initial(57), param_dtype=np.float64)
    with pytest.raises(ValueError, match=r"^beta2: found 1\.5"):
        ZeroOptimizer(comm, initial(57), betas=(0.9, 1.5))
    for intervals in ([(0, 58)], [(5, 3)], [(10, 20), (0, 5)], [(0, 10), (5, 20)], [(-1, 4)]):
        with pytest.raises(ValueError, match=r"^decay_intervals: found"):
            ZeroOptimizer(comm, initial(57), decay_intervals=intervals)
