"""The mathematics of a step on real ranks: accumulation, clipping, decay groups and evaluation, against torch."""

from __future__ import annotations

import copy
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_ckpt.model.config import ModelConfig
from mpi_ckpt.model.gpt import MiniGPT
from mpi_ckpt.train.config import ConfigError, Settings
from mpi_ckpt.train.data import Dataset, make_corpus
from mpi_ckpt.train.trainer import Trainer, decay_intervals
from tests.training import build_trainer

SMALL = ModelConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=32, seq_len=8)
TOLERANCE = 1e-6  # of an accumulated gradient, relative to its norm: float32 rounds each sum to 6e-8


def build(comm, tensor: int = 1, **changes) -> Trainer:
    return build_trainer(
        comm, tensor, Settings(**({"model": SMALL, "param_dtype": "float32", "corpus_tokens": 4000} | changes))
    )


def mean_gradient(trainer: Trainer, tokens: float) -> np.ndarray:
    """float64 [P]: of the step whose `gradients` was just called, from the sums that the ranks have left."""
    return sum(trainer.comm.allgather(trainer.optimizer.grads.astype(np.float64))) / tokens


def true_gradient(trainer: Trainer, cursor: int = 0) -> tuple[np.ndarray, float]:
    """The mean gradient and loss of the whole global batch at once, in float64, on one rank."""
    settings = trainer.settings
    model = MiniGPT(settings.model, settings.global_batch, np.float64)
    tokens, targets = trainer.data.batch(cursor, settings.global_batch, 0, 1)
    grads = np.zeros(settings.model.num_params)
    loss = model.loss_and_gradients(trainer.optimizer.params, tokens, targets, grads)
    return grads / tokens.size, loss / tokens.size


def everything(trainer: Trainer) -> list[object]:
    """All that a step could change, as bytes and values."""
    optimizer = trainer.optimizer
    arrays = [a.tobytes() for a in (optimizer.params, optimizer.master, optimizer.m, optimizer.v)]
    progress = copy.deepcopy(trainer.state["progress"])
    return [*arrays, progress, copy.deepcopy(trainer.rng.bit_generator.state), optimizer.steps_taken]


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.mpi(ranks=[1, 2, 3, 4], timeout=60, unit="s")
def test_micro_batches_give_the_gradient_of_the_one_large_batch(comm):
    for global_batch, grad_accum in itertools.product([1, 13, 16], [1, 2, 4, 7, 50]):
        trainer = build(comm, grad_accum=grad_accum, global_batch=global_batch)
        found = trainer.gradients()
        expected, loss = true_gradient(trainer)
        assert relative(mean_gradient(trainer, found.tokens), expected) < TOLERANCE
        assert found.loss == pytest.approx(loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(np.linalg.norm(expected), rel=1e-6)
        assert found.tokens == global_batch * SMALL.seq_len
        samples = -(-global_batch // comm.size)
        assert trainer.model.batch == -(-samples // grad_accum)  # memory for one micro-batch only


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_the_micro_batches_of_a_rank_are_summed_before_anything_is_sent(comm):
    trainer = build(comm, grad_accum=4, global_batch=24)
    trainer.gradients()
    tokens, targets = trainer.data.batch(0, 24, comm.rank, comm.size)
    alone = np.zeros(SMALL.num_params)
    MiniGPT(SMALL, 8, np.float64).loss_and_gradients(trainer.optimizer.params, tokens, targets, alone)
    assert relative(trainer.optimizer.grads, alone) < TOLERANCE


@pytest.mark.mpi(ranks=[1, 3], timeout=60, unit="s")
def test_noise_is_drawn_before_the_split_so_accumulation_does_not_change_it(comm):
    whole, split = (build(comm, token_noise=0.3, global_batch=13, grad_accum=k) for k in (1, 4))
    for _ in range(5):
        a, b = whole.step(), split.step()
        assert b.loss == pytest.approx(a.loss, rel=1e-5)
        assert whole.rng.bit_generator.state == split.rng.bit_generator.state
    quiet = build(comm, global_batch=13)
    assert quiet.step().loss != pytest.approx(whole.step().loss, rel=1e-4)


class Failing(MiniGPT):
    """The real model, but for one call, counted from 0, whose loss or gradient goes wrong."""

    bad_call, in_loss, value = -1, True, math.nan

    def loss_and_gradients(self, params, tokens, targets, grads, **options):
        loss = super().loss_and_gradients(params, tokens, targets, grads, **options)
        self.bad_call -= 1
        if self.bad_call != -1:
            return loss
        if not self.in_loss:
            grads[grads.size // 2] += self.value
        return self.value if self.in_loss else loss


@pytest.mark.mpi(ranks=[1, 2, 4], timeout=60, unit="s")
def test_one_bad_micro_batch_of_one_rank_shows_on_all_ranks_and_nothing_has_changed(comm):
    trainer = build(comm, grad_accum=4, global_batch=16)
    trainer.step()
    trainer.model = Failing(SMALL, trainer.model.batch)
    before = everything(trainer)
    for rank, call, in_loss, value in itertools.product(
        {0, comm.size - 1}, [0, 1, 3], [True, False], [math.nan, math.inf, -math.inf]
    ):
        if comm.rank == rank:
            trainer.model.bad_call, trainer.model.in_loss, trainer.model.value = call, in_loss, value
        found = trainer.gradients()
        finite = math.isfinite(found.loss) and math.isfinite(found.grad_norm)
        samples = len(trainer.data.batch(16, 16, rank, comm.size)[0])
        assert comm.allgather(finite) == [call >= samples] * comm.size
        trainer.model.bad_call = -1
        assert everything(trainer) == before
    again = trainer.gradients()  # the same samples, whole: nothing bad has stayed in the buffers
    assert relative(mean_gradient(trainer, again.tokens), true_gradient(trainer, 16)[0]) < TOLERANCE


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_clipping_and_decay_groups_follow_torch(comm):
    pytest.importorskip("torch")
    for decay, clip_norm in [("matrices", 0.0), ("matrices", 0.2), ("all", 0.2), ("matrices", 1e9)]:
        follow_torch(comm, decay, clip_norm)


def follow_torch(comm, decay, clip_norm):
    """torch.nn.utils.clip_grad_norm_ and AdamW with two groups, sorted by name, fed the gradients of our steps."""
    import torch

    trainer = build(comm, decay=decay, clip_norm=clip_norm, lr=0.02, weight_decay=0.5, global_batch=12, grad_accum=2)
    peer = {
        p.name: torch.tensor(trainer.optimizer.params[p.start : p.stop], dtype=torch.float64, requires_grad=True)
        for p in SMALL.parameters()
    }
    plain = [tensor for name, tensor in peer.items() if name.endswith(".bias") or ".ln" in f".{name}"]
    matrices = [tensor for tensor in peer.values() if not any(tensor is other for other in plain)]
    assert len(plain) == 10
    groups = [
        {"params": matrices, "weight_decay": 0.5},
        {"params": plain, "weight_decay": 0.5 if decay == "all" else 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(6):
        gradient = trainer.gradients()
        mean = mean_gradient(trainer, gradient.tokens)
        for p in SMALL.parameters():
            peer[p.name].grad = torch.tensor(mean[p.start : p.stop])
        if clip_norm:
            norm = torch.nn.utils.clip_grad_norm_(peer.values(), clip_norm)
            assert gradient.grad_norm == pytest.approx(float(norm), rel=1e-6)
            assert (gradient.grad_norm > clip_norm) == (clip_norm == 0.2)
        adamw.step()
        trainer.update(gradient)
        theirs = np.concatenate([tensor.detach().numpy() for tensor in peer.values()])
        np.testing.assert_allclose(trainer.optimizer.params, theirs, atol=1e-3 * 0.02)  # of lr, the longest update
        moments = np.concatenate([adamw.state[tensor]["exp_avg"].numpy() for tensor in peer.values()])
        assert relative(np.concatenate(comm.allgather(trainer.optimizer.m)), moments) < 1e-5


def test_the_decaying_intervals_are_the_matrices_merged_where_they_touch():
    parameters = SMALL.parameters()
    decaying = np.zeros(SMALL.num_params, bool)
    for start, stop in decay_intervals(parameters):
        decaying[start:stop] = True
    for p in parameters:
        assert decaying[p.start : p.stop].all() if len(p.shape) == 2 else not decaying[p.start : p.stop].any()
    intervals = decay_intervals(parameters)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(intervals))
    pieces = [SimpleNamespace(decays=d, start=i, stop=i + 1) for i, d in enumerate([1, 1, 0, 1, 1, 1, 0])]
    assert decay_intervals(pieces) == [(0, 2), (3, 6)]
    assert decay_intervals([]) == []


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_gradient_within_the_limit_keeps_its_bits(comm):
    free, limited = build(comm, clip_norm=0.0), build(comm, clip_norm=1e6)
    for _ in range(3):
        assert free.step() == limited.step()
    assert free.optimizer.params.tobytes() == limited.optimizer.params.tobytes()


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_the_rate_of_a_step_is_the_schedule_times_the_scale_of_the_state(comm):
    trainer = build(comm, lr=1e-2, warmup_steps=4)
    assert [trainer.step().lr for _ in range(5)] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2])
    trainer.state["progress"]["lr_scale"] = 0.5
    assert trainer.step().lr == 5e-3
    assert trainer.state["progress"] == {"step": 6, "cursor": 96, "optimizer_steps": 6, "lr_scale": 0.5}


@pytest.mark.mpi(ranks=[1, 2, 3, 4], timeout=60, unit="s")
def test_an_evaluation_is_the_mean_over_the_held_out_samples_and_changes_nothing(comm):
    for eval_samples in (1, 7, 64):
        check_evaluation(comm, eval_samples)


def check_evaluation(comm, eval_samples):
    trainer = build(comm, eval_samples=eval_samples, grad_accum=3, token_noise=0.2, global_batch=13)
    for _ in range(3):
        trainer.step()
    before = everything(trainer)
    loss, tokens = trainer.evaluate()
    assert everything(trainer) == before
    assert tokens == eval_samples * SMALL.seq_len
    assert len(set(comm.allgather(loss.hex()))) == 1
    corpus = make_corpus(0, 4000, SMALL.vocab_size).astype(np.int64)
    stop = (len(corpus) - 1) // SMALL.seq_len * SMALL.seq_len
    start = stop - tokens
    rows = (corpus[start + shift : stop + shift].reshape(-1, SMALL.seq_len) for shift in (0, 1))
    expected = MiniGPT(SMALL, eval_samples, np.float64).loss(trainer.optimizer.params, *rows) / tokens
    assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_steps_with_evaluations_between_and_within_them_are_the_steps_without(comm):
    settings = {"eval_samples": 20, "grad_accum": 2, "token_noise": 0.2, "param_dtype": "float16"}
    plain, evaluated = build(comm, **settings), build(comm, **settings)
    for _ in range(6):
        evaluated.evaluate()
        gradient = evaluated.gradients()
        evaluated.evaluate()
        assert evaluated.update(gradient) == plain.step()
    assert everything(evaluated) == everything(plain)


@pytest.mark.mpi(ranks=[2, 4], timeout=60, unit="s")
def test_micro_batches_clipping_and_evaluation_are_the_same_with_overlap_and_on_a_mesh(comm):
    settings = {"global_batch": 13, "eval_samples": 10, "clip_norm": 0.2, "warmup_steps": 3}
    plain = build(comm, **settings)
    others = [build(comm, t, grad_accum=3, overlap=o, **settings) for t, o in [(1, True), (2, False), (2, True)]]
    for _ in range(5):
        expected, evaluated = plain.step(), plain.evaluate()
        for trainer in others:
            found = trainer.step()
            assert found.loss == pytest.approx(expected.loss, rel=1e-5)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
            loss, tokens = trainer.evaluate()
            assert loss == pytest.approx(evaluated[0], rel=1e-5)
            assert tokens == evaluated[1]
            assert len(set(comm.allgather((found.loss.hex(), found.grad_norm.hex(), loss.hex())))) == 1


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_there_is_nothing_to_evaluate_on_when_nothing_is_held_out(comm):
    with pytest.raises(ValueError, match="held_out: found 0 samples"):
        build(comm).evaluate()


@pytest.mark.parametrize("held_out", [0, 1, 10, 100])
def test_an_epoch_visits_every_sample_once_but_those_held_out(held_out):
    tokens = np.arange(101 * 4 + 1, dtype=np.uint16)
    data = Dataset(tokens, 4, 3, vocab_size=1000, name="numbers", held_out=held_out)
    assert sorted(data.sample_ids(0, 101 - held_out).tolist()) == list(range(101 - held_out))
    if held_out:
        inputs, targets = data.held_out_batch(0, held_out)
        np.testing.assert_array_equal(inputs.ravel(), tokens[(101 - held_out) * 4 : -1])
        np.testing.assert_array_equal(targets, inputs + 1)
        np.testing.assert_array_equal(data.held_out_batch(held_out - 1, held_out)[0], inputs[-1:])


def test_a_token_outside_the_vocabulary_among_the_held_out_is_refused_where_it_is_read():
    tokens = np.zeros(41, np.uint16)
    tokens[-1] = 64
    data = Dataset(tokens, 4, 0, vocab_size=64, name="text.bin", held_out=2)
    data.held_out_batch(0, 1)
    with pytest.raises(ConfigError, match="token 64 at position 40"):
        data.held_out_batch(1, 2)


def test_holding_everything_out_is_refused_with_what_is_needed():
    with pytest.raises(ConfigError, match="found 41 tokens; expected at least 45: 11 sequence"):
        Dataset(np.zeros(41, np.uint16), 4, 0, vocab_size=64, name="text.bin", held_out=10)
