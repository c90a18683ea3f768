"""One training step in two halves, the evaluation, and the state that makes them repeatable."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpi_ckpt.checkpoint.state import PerRank, State
from mpi_ckpt.comm.collectives import gather_rows, sum_in_rank_order
from mpi_ckpt.layout import shard_range
from mpi_ckpt.model.config import Parameter
from mpi_ckpt.model.gpt import MiniGPT
from mpi_ckpt.model.split import Part
from mpi_ckpt.parallel.mesh import Mesh
from mpi_ckpt.parallel.tensor import LocalPart
from mpi_ckpt.parallel.zero import GradientSummary, StepResult, ZeroOptimizer
from mpi_ckpt.train.config import Settings
from mpi_ckpt.train.data import Dataset
from mpi_ckpt.train.schedule import learning_rate

if TYPE_CHECKING:
    from mpi4py import MPI

NOISE_STREAM = 0x6E6F697365  # "noise": keeps these draws apart from other uses of the same seed


@dataclass
class Trainer:
    """The parts of a run. `state` is all that the next step depends on: what a checkpoint holds."""

    comm: MPI.Comm
    mesh: Mesh
    settings: Settings
    model: MiniGPT
    optimizer: ZeroOptimizer
    data: Dataset
    rng: np.random.Generator
    state: State

    @classmethod
    def build(cls, comm: MPI.Comm, settings: Settings, data: Dataset, mesh: Mesh | None = None) -> Trainer:
        """**Collective.** Everything as it is before the first step; without a `mesh` of `comm`, all data parallel.

        Raises MeshError when the model cannot be split over the mesh.
        """
        mesh = mesh or Mesh(comm)
        mesh.check_model(settings.model.n_head)
        micro_batch = -(-settings.global_batch // (mesh.data.size * settings.grad_accum))
        model = MiniGPT(settings.model, micro_batch, tensor=mesh.tensor)
        pieces = [(p.whole_start, p.size, not p.whole.splits) for p in model.parts]
        optimizer = ZeroOptimizer(
            mesh.data,
            model.initial_parameters(settings.seed),
            param_dtype=settings.param_dtype,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            decay_intervals=decay_intervals(model.parts) if settings.decay == "matrices" else None,
            tensor=mesh.tensor,
            part=LocalPart(settings.model.num_params, pieces),
            overlap=settings.overlap,
        )
        rng = np.random.default_rng([NOISE_STREAM, settings.seed, mesh.data.rank])
        state: State = {
            **optimizer.state(),
            "progress": {"step": 0, "cursor": 0, "optimizer_steps": 0, "lr_scale": 1.0},
            "rng": PerRank(rng, resize=lambda old, rank, size: _reseed(_draw(old[0].build()), mesh)),
        }
        return cls(comm, mesh, settings, model, optimizer, data, rng, state)

    def step(self) -> StepResult:
        """**Collective.** The next step of the run, in one."""
        return self.update(self.gradients())

    def gradients(self) -> GradientSummary:
        """**Collective.** The first half of the next step: its samples from the cursor on, forward, backward, the sum.

        Nothing changes but the generator of the noise. A loss or gradient element that is not finite, in any
        micro-batch of any rank, makes the loss or the norm here not finite on every rank.
        """
        cursor, global_batch = self.state["progress"]["cursor"], self.settings.global_batch
        tokens, targets = self.data.batch(cursor, global_batch, self.mesh.data.rank, self.mesh.data.size)
        self._add_noise(tokens)  # before the split: the draws do not depend on it
        loss_sum = self._accumulate(tokens, targets)
        return self.optimizer.reduce_gradients(tokens.size, loss_sum)

    def update(self, gradient: GradientSummary, lr_factor: float = 1.0) -> StepResult:
        """**Collective.** The second half: clip, AdamW on my shard, all parameters to all ranks; progress advances.

        Clipping scales the mean gradient to the norm `clip_norm` where it is longer (Pascanu et al., arXiv:1211.5063,
        algorithm 1); a gradient within it keeps its bits. `lr_factor` is for this step alone.
        """
        settings, optimizer, progress = self.settings, self.optimizer, self.state["progress"]
        progress["step"] += 1
        progress["cursor"] += settings.global_batch
        lr = learning_rate(settings, progress["step"]) * progress["lr_scale"] * lr_factor
        too_long = 0 < settings.clip_norm < gradient.grad_norm
        clip = settings.clip_norm / gradient.grad_norm if too_long else 1.0
        optimizer.apply(lr, clip / gradient.tokens)
        progress["optimizer_steps"] = optimizer.steps_taken
        return StepResult(gradient.loss, gradient.grad_norm, optimizer.replica_norm(), lr)

    def evaluate(self) -> tuple[float, int]:
        """**Collective.** The mean loss over the held-out samples, the same bits on every rank, and their tokens.

        Forward only, without noise, on samples shared over the ranks; no state changes. Raises ValueError when nothing
        is held out.
        """
        if not self.data.held_out:
            raise ValueError("held_out: found 0 samples; expected at least 1 to evaluate on")
        start, stop = shard_range(self.data.held_out, self.mesh.data.size, self.mesh.data.rank)
        loss_sum = 0.0
        for first in range(start, stop, self.model.batch):
            tokens, targets = self.data.held_out_batch(first, min(first + self.model.batch, stop))
            loss_sum += self.model.loss(self.optimizer.params, tokens, targets)
        once = 1.0 if self.mesh.tensor.rank == 0 else 0.0  # tensor ranks have seen the same samples
        total = float(sum_in_rank_order(gather_rows(self.comm, [once * loss_sum]))[0])
        tokens_seen = self.data.held_out * self.data.seq_len
        return total / tokens_seen, tokens_seen

    def restored(self, saved_mesh: dict[str, int] | None = None) -> None:
        """**Collective.** Bring the rest in line with a state that a checkpoint has just been read into.

        `saved_mesh` is the shape of the mesh that saved it; None: this one.
        """
        progress = self.state["progress"]
        if progress.pop("lr", None) is not None:  # written before learning rates were a function of the step
            progress["lr_scale"] = 1.0
        self.optimizer.restored(progress["optimizer_steps"])
        if saved_mesh not in (None, self.mesh.shape) and math.prod(saved_mesh.values()) == self.comm.size:
            # As many ranks as before, so each has a stream of noise back; but they are to share them in another way.
            drawn = _draw(self.rng)
            self.mesh.tensor.broadcast(drawn)
            self.rng.bit_generator.state = _reseed(drawn, self.mesh).bit_generator.state

    def _accumulate(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """**Local.** The sum of the losses of all micro-batches; the sum of their gradients is in `optimizer.grads`."""
        loss_sum = 0.0
        for k in range(self.settings.grad_accum):
            start, stop = shard_range(len(tokens), self.settings.grad_accum, k)  # no later one is larger than the first
            last = k == self.settings.grad_accum - 1
            if k == 0 or start < stop or last:
                loss_sum += self.model.loss_and_gradients(
                    self.optimizer.params,
                    tokens[start:stop],
                    targets[start:stop],
                    self.optimizer.grads,
                    accumulate=k > 0,
                    on_gradients_ready=self.optimizer.gradients_ready if last and self.settings.overlap else None,
                )
        return loss_sum

    def _add_noise(self, tokens: np.ndarray) -> None:
        """Word dropout (Iyyer et al., ACL 2015): replace input tokens by random ones, from this rank's generator."""
        if self.settings.token_noise > 0:
            hit = self.rng.random(tokens.shape) < self.settings.token_noise
            tokens[hit] = self.rng.integers(self.settings.model.vocab_size, size=int(hit.sum()))


def decay_intervals(parameters: Iterable[Parameter | Part]) -> list[tuple[int, int]]:
    """**Local.** Where in the flat vector the parameters lie that decay: sorted, neighbours merged."""
    merged: list[tuple[int, int]] = []
    for parameter in parameters:
        if parameter.decays and merged and merged[-1][1] == parameter.start:
            merged[-1] = merged[-1][0], parameter.stop
        elif parameter.decays:
            merged.append((parameter.start, parameter.stop))
    return merged


def _draw(old: np.random.Generator) -> np.ndarray:
    """What seeds the streams that follow on `old`."""
    return old.integers(2**63, size=4)


def _reseed(drawn: np.ndarray, mesh: Mesh) -> np.random.Generator:
    """The stream of a data rank after a change of the mesh, the same for all its tensor ranks.

    It is seeded by what old rank 0 would have `drawn` next; on as many ranks as before, the first of its tensor ranks.
    """
    return np.random.default_rng([*drawn.tolist(), mesh.data.rank, mesh.data.size])
