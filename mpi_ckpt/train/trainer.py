"""One training step, and the state that makes it repeatable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_ckpt.checkpoint.state import PerRank, State
from mpi_ckpt.model.gpt import MiniGPT
from mpi_ckpt.parallel.zero import StepResult, ZeroOptimizer
from mpi_ckpt.train.config import Settings
from mpi_ckpt.train.data import Dataset

if TYPE_CHECKING:
    from mpi4py import MPI

NOISE_STREAM = 0x6E6F697365  # "noise": keeps these draws apart from other uses of the same seed


@dataclass
class Trainer:
    """The parts of a run. `state` is all that the next step depends on: what a checkpoint holds."""

    comm: MPI.Comm
    settings: Settings
    model: MiniGPT
    optimizer: ZeroOptimizer
    data: Dataset
    rng: np.random.Generator
    state: State

    @classmethod
    def build(cls, comm: MPI.Comm, settings: Settings, data: Dataset) -> Trainer:
        """**Collective.** Everything as it is before the first step."""
        model = MiniGPT(settings.model, batch=-(-settings.global_batch // comm.size))
        optimizer = ZeroOptimizer(
            comm,
            model.initial_parameters(settings.seed),
            param_dtype=settings.param_dtype,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        rng = np.random.default_rng([NOISE_STREAM, settings.seed, comm.rank])
        state: State = {
            **optimizer.state(),
            "progress": {"step": 0, "cursor": 0, "optimizer_steps": 0, "lr": settings.lr},
            "rng": PerRank(rng, resize=_reseed),
        }
        return cls(comm, settings, model, optimizer, data, rng, state)

    def step(self) -> StepResult:
        """**Collective.** The next step of the run."""
        settings, optimizer, progress = self.settings, self.optimizer, self.state["progress"]

        tokens, targets = self.data.batch(progress["cursor"], settings.global_batch, self.comm.rank, self.comm.size)
        self._add_noise(tokens)
        loss_sum = self.model.loss_and_gradients(optimizer.params, tokens, targets, optimizer.grads)
        result = optimizer.step(progress["lr"], tokens.size, loss_sum)  # Reduce_scatter, AdamW on my shard, Allgather

        progress["step"] += 1
        progress["cursor"] += settings.global_batch
        progress["optimizer_steps"] = optimizer.steps_taken
        return result

    def restored(self) -> None:
        """**Collective.** Bring the rest in line with a state that a checkpoint has just been read into."""
        self.optimizer.steps_taken = self.state["progress"]["optimizer_steps"]
        self.optimizer.gather_parameters()

    def _add_noise(self, tokens: np.ndarray) -> None:
        """Word dropout (Iyyer et al., ACL 2015): replace input tokens by random ones, from this rank's generator."""
        if self.settings.token_noise > 0:
            hit = self.rng.random(tokens.shape) < self.settings.token_noise
            tokens[hit] = self.rng.integers(self.settings.model.vocab_size, size=int(hit.sum()))


def _reseed(old: list[Any], rank: int, size: int) -> np.random.Generator:
    """The stream of a rank after a change of their number: seeded by what old rank 0 would have drawn next."""
    return np.random.default_rng([*old[0].build().integers(2**63, size=4).tolist(), rank, size])
