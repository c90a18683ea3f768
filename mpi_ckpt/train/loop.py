"""A launch from beginning to end: decide, resume or start, train, checkpoint, check."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mpi_ckpt.checkpoint.checkpointer import Checkpointer
from mpi_ckpt.checkpoint.sharded import verify_resume
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.collectives import gather_rows
from mpi_ckpt.parallel.zero import StepResult
from mpi_ckpt.storage import names
from mpi_ckpt.train import checks, console
from mpi_ckpt.train.config import Options, Settings, resolve
from mpi_ckpt.train.data import Dataset, open_dataset
from mpi_ckpt.train.metrics import MetricsLog
from mpi_ckpt.train.run import CHECKPOINTS, Plan, choose_directory, plan_launch, store
from mpi_ckpt.train.trainer import Trainer

if TYPE_CHECKING:
    from mpi4py import MPI


def run(comm: MPI.Comm, explicit: dict[str, Any], steps: int | None, options: Options) -> None:
    """**Collective.** One launch of the program.

    `explicit` are the settings on the command line, `steps` the number of steps of the run if it is given there.
    Raises ConfigError, CheckFailed or a CheckpointError, the same on every rank.
    """
    council = Council(comm)
    if options.run_dir is None:
        resolve(explicit, None, comm.size)  # a mistake must not leave a new directory behind
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
        first = _resume(checkpointer, trainer, plan, options) + 1
        if log:
            log.write({"event": "launch", "step": first - 1, "ranks": comm.size, "settings": plan.settings.to_json()})
        if first <= plan.last_step:
            every = options.log_every or max(1, (plan.last_step - first + 1) // 20)
            with console.StepTable(first, plan.last_step, every, enabled=comm.rank == 0) as table:
                losses = train(trainer, checkpointer, first, plan.last_step, log, table)
            _check_results(council, checkpointer, trainer, plan, losses)
        elif comm.rank == 0:
            print(f"{run_dir}: step {plan.last_step} is done already; nothing to train")
        if log:
            reason = "finished" if plan.last_step == plan.steps else "stop-at"
            log.write({"event": "finish", "step": max(first - 1, plan.last_step), "reason": reason})
    council.close()


def train(
    trainer: Trainer,
    checkpointer: Checkpointer,
    first: int,
    last: int,
    log: MetricsLog | None,
    table: console.StepTable,
) -> list[float]:
    """**Collective.** Steps `first` to `last`, checkpointed when due and at the end; returns their losses."""
    settings = trainer.settings
    stored = settings.to_json()
    index = {p.name: (p.start, p.shape) for p in settings.model.parameters()}
    losses = []
    for step in range(first, last + 1):
        began = time.perf_counter()
        result = trainer.step()
        checks.check_replicas(trainer.comm, step, result.param_norm)
        losses.append(result.loss)
        if log:  # before the step can commit: the log never knows less than the newest checkpoint
            row = _row(step, result, settings, time.perf_counter() - began)
            log.write(row)
            table.row(row)
        meta = {"settings": stored, "cursor": trainer.state["progress"]["cursor"]}
        about: dict[str, Any] = {"meta": meta, "metrics": {"loss": result.loss}, "index": index}
        if not checkpointer.save_if_due(step, trainer.state, **about) and step == last:
            checkpointer.save(step, trainer.state, **about)
    return losses


def _row(step: int, result: StepResult, settings: Settings, seconds: float) -> dict[str, Any]:
    return {
        "step": step,
        "loss": result.loss,
        "lr": settings.lr,
        "param_norm": result.param_norm,
        "grad_norm": result.grad_norm,
        "step_seconds": seconds,
        "tokens_per_second": settings.global_batch * settings.model.seq_len / seconds,
    }


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
    """**Collective.** Restore what there is; returns the step after which training continues, 0 for none."""
    world_size = "any" if options.elastic else "same"
    found = checkpointer.restore(trainer.state, plan.resume_from, world_size=world_size, on_damage=options.on_damage)
    if found is None:
        return 0
    if plan.resume_from is not None:
        checkpointer.discard_after(found.step)
    trainer.restored()
    if trainer.comm.rank == 0:
        print(f"resumed {plan.run_dir} after step {found.step}", flush=True)
    return found.step


def _check_results(
    council: Council, checkpointer: Checkpointer, trainer: Trainer, plan: Plan, losses: list[float]
) -> None:
    """**Collective.** The checks at the end of a launch, and their report."""
    comm, optimizer = trainer.comm, trainer.optimizer
    council.everywhere(lambda: checks.check_optimizer_bytes(optimizer, comm.rank))
    memory = [optimizer.params.nbytes, optimizer.grads.nbytes, optimizer.optimizer_bytes, checks.resident_bytes()]
    rows = gather_rows(comm, memory)
    checkpointer.wait_until_finished()
    manifest = verify_resume(trainer.state, checkpointer.root, plan.last_step, comm)
    if comm.rank == 0:
        console.print_memory(rows.tolist(), optimizer.params.size)
        console.print_manifest(manifest, names.step_dir(checkpointer.root, plan.last_step))
        print(f"resume verified: step {plan.last_step} read back is the state in memory, bit for bit, on every rank")
    whole_default_run = plan.fresh and len(losses) == 20 and _is_default(plan.settings, comm.size)
    if whole_default_run:
        checks.check_loss_falls(losses)


def _is_default(settings: Settings, ranks: int) -> bool:
    return settings == Settings(global_batch=4 * ranks, seed=settings.seed)
