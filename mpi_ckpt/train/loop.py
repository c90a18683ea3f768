"""The training loop, and what stands around it: resume first, train, then check what was done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_ckpt.checkpoint.checkpointer import Checkpointer
from mpi_ckpt.checkpoint.sharded import verify_resume
from mpi_ckpt.checkpoint.state import PerRank, State
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.collectives import gather_rows
from mpi_ckpt.model.gpt import MiniGPT
from mpi_ckpt.parallel.zero import ZeroOptimizer
from mpi_ckpt.storage import names
from mpi_ckpt.train import checks, console
from mpi_ckpt.train.config import Options, Settings
from mpi_ckpt.train.data import Dataset, open_dataset
from mpi_ckpt.train.metrics import MetricsLog
from mpi_ckpt.train.run import CHECKPOINTS, Plan, choose_directory, plan_launch, store

if TYPE_CHECKING:
    from mpi4py import MPI

NOISE_STREAM = 0x6E6F697365  # "noise": keeps these draws apart from other uses of the same seed


def run(comm: MPI.Comm, explicit: dict[str, Any], steps: int | None, options: Options) -> None:
    """**Collective.** One launch: decide, resume or start, train, checkpoint, check.

    Raises ConfigError, CheckFailed or a CheckpointError, the same on every rank.
    """
    council = Council(comm)
    run_dir = council.share(lambda: choose_directory(options))
    log = council.everywhere(lambda: MetricsLog(run_dir) if comm.rank == 0 else None)
    with Checkpointer(
        run_dir / CHECKPOINTS,
        comm,
        every=options.ckpt_every,
        keep=options.keep,
        async_io=options.async_io,
        on_event=log.write if log else None,
    ) as checkpointer:
        plan = council.share(lambda: plan_launch(run_dir, explicit, steps, options, comm.size))
        data = council.everywhere(lambda: _open_data(plan))
        council.share(lambda: store(plan, data.identity))
        trainer = Trainer.build(comm, plan.settings, data)
        first = _resume(checkpointer, trainer, plan, options)
        if log:
            log.write({"event": "launch", "step": first - 1, "ranks": comm.size, "settings": plan.settings.to_json()})
        if first > plan.last_step:
            if comm.rank == 0:
                print(f"{run_dir}: step {plan.last_step} is done already; nothing to train")
        else:
            losses = trainer.train(checkpointer, first, plan, options, log)
            _check_results(comm, council, checkpointer, trainer, plan, losses)
        if log:
            reason = "finished" if plan.last_step == plan.steps else "stop-at"
            log.write({"event": "finish", "step": max(first - 1, plan.last_step), "reason": reason})
    council.close()


@dataclass
class Trainer:
    """The parts of a training run, and the state that a checkpoint holds."""

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

    def train(
        self, checkpointer: Checkpointer, first: int, plan: Plan, options: Options, log: MetricsLog | None
    ) -> list[float]:
        """**Collective.** Steps `first` to `plan.last_step`; returns their losses."""
        settings, optimizer, comm = self.settings, self.optimizer, self.comm
        every = options.log_every or max(1, (plan.last_step - first + 1) // 20)
        losses = []
        with console.StepTable(first, plan.last_step, every, enabled=comm.rank == 0) as table:
            for step in range(first, plan.last_step + 1):
                began = time.perf_counter()
                progress = self.state["progress"]
                tokens, targets = self.data.batch(progress["cursor"], settings.global_batch, comm.rank, comm.size)
                self._add_noise(tokens)
                loss_sum = self.model.loss_and_gradients(optimizer.params, tokens, targets, optimizer.grads)
                result = optimizer.step(progress["lr"], tokens.size, loss_sum)
                checks.check_replicas(comm, step, result.param_norm)
                progress["step"] = step
                progress["cursor"] += settings.global_batch
                progress["optimizer_steps"] = optimizer.steps_taken
                seconds = time.perf_counter() - began
                losses.append(result.loss)
                if log:
                    row = _row(step, result, progress["lr"], seconds, settings)
                    log.write(row)
                    table.row(row)
                self._save(checkpointer, step, last=step == plan.last_step)
        return losses

    def _add_noise(self, tokens: np.ndarray) -> None:
        """Word dropout (Iyyer et al., ACL 2015): replace input tokens by random ones, from this rank's generator."""
        if self.settings.token_noise > 0:
            hit = self.rng.random(tokens.shape) < self.settings.token_noise
            tokens[hit] = self.rng.integers(self.settings.model.vocab_size, size=int(hit.sum()))

    def _save(self, checkpointer: Checkpointer, step: int, *, last: bool) -> None:
        about: dict[str, Any] = {
            "meta": {"settings": self.settings.to_json(), "cursor": self.state["progress"]["cursor"]},
            "index": {p.name: (p.start, p.shape) for p in self.settings.model.parameters()},
        }
        if not checkpointer.save_if_due(step, self.state, **about) and last:
            checkpointer.save(step, self.state, **about)


def _open_data(plan: Plan) -> Dataset:
    settings = plan.settings
    data = open_dataset(
        settings.data,
        settings.model.seq_len,
        settings.seed,
        vocab_size=settings.model.vocab_size,
        total_tokens=settings.corpus_tokens,
    )
    if plan.stored_data is not None:
        data.identity.check_unchanged(plan.stored_data)
    return data


def _resume(checkpointer: Checkpointer, trainer: Trainer, plan: Plan, options: Options) -> int:
    """**Collective.** Restore what there is; returns the first step to train."""
    world_size = "any" if options.elastic else "same"
    found = checkpointer.restore(trainer.state, plan.resume_from, world_size=world_size, on_damage=options.on_damage)
    if found is None:
        return 1
    if plan.resume_from is not None:
        checkpointer.discard_after(found.step)
    trainer.optimizer.steps_taken = trainer.state["progress"]["optimizer_steps"]
    trainer.optimizer.gather_parameters()
    if trainer.comm.rank == 0:
        print(f"resumed {plan.run_dir} after step {found.step}", flush=True)
    return found.step + 1


def _reseed(old: list[Any], rank: int, size: int) -> np.random.Generator:
    """The stream of a rank after a change of their number: seeded by what old rank 0 would have drawn next."""
    return np.random.default_rng([*old[0].build().integers(2**63, size=4).tolist(), rank, size])


def _row(step: int, result: Any, lr: float, seconds: float, settings: Settings) -> dict[str, Any]:
    return {
        "step": step,
        "loss": result.loss,
        "lr": lr,
        "param_norm": result.param_norm,
        "grad_norm": result.grad_norm,
        "step_seconds": seconds,
        "tokens_per_second": settings.global_batch * settings.model.seq_len / seconds,
    }


def _check_results(
    comm: MPI.Comm, council: Council, checkpointer: Checkpointer, trainer: Trainer, plan: Plan, losses: list[float]
) -> None:
    """**Collective.** The checks at the end of a launch, and their report."""
    optimizer = trainer.optimizer
    council.everywhere(lambda: checks.check_optimizer_bytes(optimizer, comm.rank))
    memory = [optimizer.params.nbytes, optimizer.grads.nbytes, optimizer.optimizer_bytes, checks.resident_bytes()]
    rows = gather_rows(comm, memory)
    checkpointer.wait_until_finished()
    manifest = verify_resume(trainer.state, checkpointer.root, plan.last_step, comm)
    if comm.rank == 0:
        console.print_memory(rows.tolist(), optimizer.params.size)
        console.print_manifest(manifest, names.step_dir(checkpointer.root, plan.last_step))
        print(f"resume verified: step {plan.last_step} read back is the state in memory, bit for bit, on every rank")
    if plan.fresh and len(losses) == 20 and _is_default(plan.settings, comm.size):
        checks.check_loss_falls(losses)


def _is_default(settings: Settings, ranks: int) -> bool:
    return settings == Settings(global_batch=4 * ranks, seed=settings.seed)
