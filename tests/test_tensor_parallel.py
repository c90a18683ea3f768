"""A model that tensor ranks share is the model of one rank: its losses, gradients, norms and checkpoints."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt import Checkpointer
from mpi_ckpt.layout import Shard
from mpi_ckpt.model import MiniGPT, ModelConfig
from mpi_ckpt.model.split import parts_of
from mpi_ckpt.parallel.tensor import TensorGroup
from mpi_ckpt.train.config import Settings
from mpi_ckpt.train.trainer import Trainer
from tests.ranks import same_everywhere
from tests.training import build_trainer

REFERENCE = Path(__file__).parent / "reference" / "minigpt_gradients.npz"
LONG = ModelConfig(n_layer=2, n_embd=24, n_head=12, vocab_size=57, seq_len=70)  # two blocks of queries
ARRAYS = ("param", "master", "m", "v")


def build(comm, tensor_ranks: int, **changes) -> Trainer:
    return build_trainer(comm, tensor_ranks, Settings(**({"global_batch": 16} | changes)))


def local(parts, whole: np.ndarray) -> np.ndarray:
    """What of a vector of the whole model the rank of `parts` holds."""
    return np.concatenate([whole[p.whole_start : p.whole_start + p.size] for p in parts])


def problem(config: ModelConfig, batch: int, seed: int = 3):
    rng = np.random.default_rng(seed)
    params = rng.normal(0.0, 0.3, config.num_params)
    tokens, targets = rng.integers(0, config.vocab_size, (2, batch, config.seq_len))
    return params, tokens, targets


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_the_parts_of_all_tensor_ranks_are_the_model_and_lie_at_the_same_places(ranks):
    parts = [parts_of(LONG, rank, ranks) for rank in range(ranks)]
    covered = np.zeros(LONG.num_params, int)
    for rank_parts in parts:
        assert [(p.start, p.shape) for p in rank_parts] == [(p.start, p.shape) for p in parts[0]]
        for p in rank_parts:
            assert p.shape[1:] == p.whole.shape[1:]
            covered[p.whole_start : p.whole_start + p.size] += 1
    for whole in LONG.parameters():
        names = ("qkv.weight", "qkv.bias", "fc.weight", "fc.bias", "attn_proj.weight", "mlp_proj.weight")
        times = 1 if whole.name.endswith(names) else ranks
        assert (covered[whole.start : whole.stop] == times).all(), whole.name


@pytest.mark.mpi(ranks=[2, 4], timeout=60, unit="s")
def test_the_number_of_tensor_ranks_does_not_change_the_initial_model(comm):
    config = ModelConfig()
    mine = MiniGPT(config, 1, tensor=TensorGroup(comm))
    assert mine.initial_parameters(7).tobytes() == local(mine.parts, MiniGPT(config, 1).initial_parameters(7)).tobytes()


@pytest.mark.mpi(ranks=[2, 4], timeout=60, unit="s")
def test_loss_and_gradients_are_those_of_one_rank(comm):
    for dtype, tolerance in ((np.float32, 3e-6), (np.float64, 1e-13)):
        check_gradients(comm, dtype, tolerance)


def check_gradients(comm, dtype, tolerance: float) -> None:
    params, tokens, targets = problem(LONG, 3)
    expected = np.empty(LONG.num_params)
    expected_loss = MiniGPT(LONG, 3, np.float64).loss_and_gradients(params, tokens, targets, expected)
    model = MiniGPT(LONG, 3, dtype, TensorGroup(comm))
    mine = local(model.parts, params).astype(dtype)
    grads = np.full(mine.shape, np.nan, dtype)
    loss = model.loss_and_gradients(mine, tokens, targets, grads)
    assert loss == model.loss(mine, tokens, targets) == pytest.approx(expected_loss, rel=tolerance)
    same_everywhere(comm, loss)
    for p, whole in zip(model.parts, LONG.parameters(), strict=True):
        wanted = local([p], expected)
        error = np.abs(grads[p.start : p.stop] - wanted).max() / np.abs(expected[whole.start : whole.stop]).max()
        assert error < tolerance, whole.name
        if not whole.splits:  # every tensor rank has it, to the bit
            same_everywhere(comm, grads[p.start : p.stop].tobytes())
    once = grads.copy()
    model.loss_and_gradients(mine, tokens, targets, grads, accumulate=True)
    assert grads.tobytes() == (once + once).tobytes()


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_gradients_equal_the_committed_reference_of_pytorch(comm):
    reference = np.load(REFERENCE, allow_pickle=False)
    fields = ("n_layer", "n_embd", "n_head", "vocab_size", "seq_len")
    config = ModelConfig(**{name: int(reference[name]) for name in fields})
    model = MiniGPT(config, len(reference["tokens"]), np.float64, TensorGroup(comm))
    mine = local(model.parts, reference["params"])
    grads = np.empty(len(mine))
    loss = model.loss_and_gradients(mine, reference["tokens"], reference["targets"], grads)
    assert loss == pytest.approx(float(reference["loss"]), rel=1e-13)
    wanted = local(model.parts, reference["grads"])
    assert np.abs(grads - wanted).max() < 1e-13 * np.abs(wanted).max()


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_gradients_equal_central_differences_in_float64(comm):
    config = ModelConfig(n_layer=1, n_embd=8, n_head=2, vocab_size=11, seq_len=5)
    params, tokens, targets = problem(config, 2)
    model = MiniGPT(config, 2, np.float64, TensorGroup(comm))
    grads = np.empty(len(local(model.parts, params)))
    model.loss_and_gradients(local(model.parts, params), tokens, targets, grads)
    rng, h = np.random.default_rng(0), 1e-6
    for p, whole in zip(model.parts, config.parameters(), strict=True):
        direction = np.zeros(config.num_params)  # the same on both ranks: they move one model
        direction[whole.start : whole.stop] = rng.normal(size=whole.size)
        up, down = (model.loss(local(model.parts, params + sign * h * direction), tokens, targets) for sign in (1, -1))
        slope = np.array(grads[p.start : p.stop] @ local([p], direction))
        if whole.splits:
            comm.Allreduce(slope.copy(), slope)
        assert (up - down) / (2 * h) == pytest.approx(float(slope), rel=1e-5, abs=1e-6), whole.name


@pytest.mark.mpi(ranks=[4], timeout=120, unit="s")
def test_forty_losses_of_the_default_configuration_are_those_of_a_single_rank(comm):
    from mpi4py import MPI

    alone = build(MPI.COMM_SELF, 1, eval_samples=10)
    expected = [alone.step() for _ in range(40)]
    for tensor_ranks in (2, 4):
        trainer = build(comm, tensor_ranks, eval_samples=10)
        results = [trainer.step() for _ in range(40)]
        np.testing.assert_allclose([r.loss for r in results], [r.loss for r in expected], rtol=1e-4)
        np.testing.assert_allclose([r.grad_norm for r in results], [r.grad_norm for r in expected], rtol=1e-2)
        assert results[0].grad_norm == pytest.approx(expected[0].grad_norm, rel=1e-5)  # each element counts once
        same_everywhere(comm, [(r.loss, r.grad_norm) for r in results])
        assert len(set(trainer.mesh.data.allgather(results[-1].param_norm))) == 1
        assert trainer.evaluate() == (pytest.approx(alone.evaluate()[0], rel=1e-4), alone.evaluate()[1])
        same_everywhere(comm, trainer.evaluate())
        assert 0 < trainer.mesh.tensor.watch.seconds <= trainer.optimizer.communication_seconds


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_what_tensor_ranks_share_stays_the_same_to_the_bit_even_if_their_sums_differ(comm):
    trainer = build(comm, 2)
    optimizer, model = trainer.optimizer, trainer.model
    for _ in range(3):
        trainer.gradients()
        optimizer.grads *= np.float32(1 + 1e-6 * trainer.mesh.tensor.rank)  # as an unlike processor would have it
        optimizer.apply(0.01, 1 / optimizer.reduce_gradients(16, 1.0).tokens)
    held = {
        name: np.concatenate(trainer.mesh.data.allgather(getattr(optimizer, name))) for name in ("master", "m", "v")
    }
    for array in (optimizer.params, *held.values()):
        same_everywhere(comm, [array[p.start : p.stop].tobytes() for p in model.parts if not p.whole.splits])


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_bad_gradient_or_loss_of_any_one_rank_shows_on_all(comm):
    trainer = build(comm, 2)
    optimizer, parts = trainer.optimizer, {p.whole.name: p for p in trainer.model.parts}
    for victim, bad in itertools.product(range(comm.size), (np.nan, np.inf)):
        for name in ("wte.weight", "blocks.1.qkv.weight", "head.weight"):
            optimizer.grads.fill(1.0)
            if comm.rank == victim:
                optimizer.grads[parts[name].start] = bad
            assert not np.isfinite(optimizer.reduce_gradients(16, 1.0).grad_norm), (victim, name)
        optimizer.grads.fill(1.0)
        assert not np.isfinite(optimizer.reduce_gradients(16, bad if comm.rank == victim else 1.0).loss), victim
    assert np.isfinite(optimizer.reduce_gradients(16, 1.0)).all()


def fill(trainer: Trainer, whole: dict[str, np.ndarray]) -> None:
    """Give every rank its part of `whole`, what it shares included."""
    optimizer, parts = trainer.optimizer, trainer.model.parts
    optimizer.params[:] = local(parts, whole["param"])
    for name in ("master", "m", "v"):
        getattr(optimizer, name)[:] = local(parts, whole[name])[optimizer.start : optimizer.stop]


def assert_holds(trainer: Trainer, whole: dict[str, np.ndarray]) -> None:
    optimizer, parts = trainer.optimizer, trainer.model.parts
    assert optimizer.params.tobytes() == local(parts, whole["param"]).tobytes()
    for name in ("master", "m", "v"):
        mine = local(parts, whole[name])[optimizer.start : optimizer.stop]
        assert getattr(optimizer, name).tobytes() == mine.tobytes(), name


@pytest.mark.mpi(ranks=[4], timeout=120, unit="s")
@pytest.mark.parametrize("param_dtype", ["float16", "float32"])
def test_checkpoints_of_any_mesh_restore_into_any_other_bit_for_bit(comm, shared_path, param_dtype):
    """(4, 1) -> (2, 2) -> (1, 4) -> (4, 1) -> (1, 4) -> (2, 2), each into arrays poisoned with NaN."""
    numel = ModelConfig().num_params
    whole = {name: np.arange(numel, dtype=np.float32) + 1e5 * i for i, name in enumerate(ARRAYS)}
    whole["param"] = (np.arange(numel) % 2039).astype(param_dtype)
    trainer = build(comm, 1, param_dtype=param_dtype)
    fill(trainer, whole)
    trainer.state["progress"] = {"step": 5, "cursor": 80, "optimizer_steps": 5, "lr_scale": 1.0}
    with Checkpointer(shared_path, comm, keep=None) as checkpointer:
        checkpointer.save(0, trainer.state)
        for step, tensor_ranks in enumerate((2, 4, 1, 4, 2), start=1):
            trainer = build(comm, tensor_ranks, param_dtype=param_dtype)
            optimizer = trainer.optimizer
            for array in (optimizer.params, optimizer.master, optimizer.m, optimizer.v):
                array.fill(np.nan)
            checkpointer.restore(trainer.state, world_size="any")
            trainer.restored()
            assert_holds(trainer, whole)
            assert optimizer.steps_taken == 5
            checkpointer.save(step, trainer.state)


@pytest.mark.mpi(ranks=[4], timeout=120, unit="s")
def test_forty_losses_over_three_meshes_are_those_of_a_single_rank(comm, shared_path):
    from mpi4py import MPI

    alone = build(MPI.COMM_SELF, 1)
    expected = [alone.step().loss for _ in range(40)]
    found: list[float] = []
    with Checkpointer(shared_path, comm) as checkpointer:
        for tensor_ranks in (1, 2, 4, 1):
            trainer = build(comm, tensor_ranks)
            if checkpointer.restore(trainer.state, world_size="any"):
                trainer.restored()
            found += [trainer.step().loss for _ in range(10)]
            checkpointer.save(len(found), trainer.state)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_the_shards_of_a_mesh_store_every_element_once(comm):
    for tensor_ranks in (1, 2, 4):
        trainer = build(comm, tensor_ranks)
        for name in ARRAYS:
            shards = trainer.state[name]
            shards = [shards] if isinstance(shards, Shard) else shards
            assert len(shards) == 1 or tensor_ranks > 1
            covered = np.zeros(ModelConfig().num_params, int)
            for shard in shards:
                assert shard.shape == covered.shape
                covered[shard.block.start[0] : shard.block.stop[0]] += 1
            assert (comm.allreduce(covered) == 1).all()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_noise_is_the_same_on_all_tensor_ranks_and_another_on_each_data_rank_also_after_a_change_of_the_mesh(comm):
    def check(trainer: Trainer) -> None:
        draws = comm.allgather(trainer.rng.random(4).tolist())
        width = trainer.mesh.tensor.size
        assert all(draws[r] == draws[r - r % width] for r in range(comm.size))
        assert len({tuple(d) for d in draws}) == trainer.mesh.data.size

    saved = {}
    for width in (1, 2, 4):
        check(build(comm, width))
        saved[width] = build(comm, width)
    for old in saved.values():
        for width in (1, 2, 4):
            trainer = build(comm, width)
            trainer.rng.bit_generator.state = old.rng.bit_generator.state  # what a restore on 4 ranks does
            trainer.restored(old.mesh.shape)
            if width == old.mesh.tensor.size:
                assert trainer.rng.bit_generator.state == old.rng.bit_generator.state
            check(trainer)


# -- the program -------------------------------------------------------------------------------------------------------

HARD = ("--token-noise", "0.1", "--grad-accum", "2", "--global-batch", "14", "--ckpt-every", "3steps", "--steps", "9")


def losses(run_dir: Path) -> dict[int, str]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"].hex() for row in lines if "event" not in row}


def test_a_resume_on_the_same_mesh_is_bit_identical_and_another_mesh_needs_elastic(launch):
    mesh = "--tensor-parallel", "2"
    launch.train(4, "--run-dir", "whole", *mesh, *HARD).check()
    launch.train(4, "--run-dir", "run", *mesh, *HARD, "--stop-at", "5").check()
    refused = launch.train(4, "--run-dir", "run", *HARD)
    assert refused.status == 2
    assert refused.stderr.count("saved by another mesh of ranks") == 4
    assert "--elastic" in refused.stderr
    launch.train(4, "--run-dir", "run", *mesh, *HARD).check()
    assert losses(launch.cwd / "run") == losses(launch.cwd / "whole")
    meta = json.loads((launch.cwd / "run/checkpoints/step_00000009/manifest.json").read_text())["meta"]
    assert meta["mesh"] == {"data": 2, "tensor": 2}
    longer = [*HARD[:-1], "12"]
    launch.train(2, "--run-dir", "run", "--tensor-parallel", "2", "--elastic", *longer).check()
    assert sorted(losses(launch.cwd / "run")) == list(range(1, 13))
