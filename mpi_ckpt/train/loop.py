"""Training, step by step: inject, gradients, guard, update, log, evaluate, checkpoint, leave if asked to."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

from mpi_ckpt.parallel.zero import StepResult
from mpi_ckpt.train import checks, console, inject, rollback
from mpi_ckpt.train.job import Job


def train(job: Job, table: console.StepTable) -> int:
    """**Collective.** Up to the last step of this launch, or until some rank is asked to leave.

    Checkpoints when due and before it returns; returns why it left early, see `preemption.REASONS`, or 0. If the run
    holds samples out, it evaluates on them at every multiple of `eval_every` and at the end.
    """
    last, eval_every = job.plan.last_step, job.options.eval_every
    spike_factor = job.options.spike_factor if job.options.guard else math.inf
    while (step := job.progress["step"] + 1) <= last:
        began, waited = time.perf_counter(), job.trainer.optimizer.communication_seconds
        lr_factor = _inject(job, step)
        first = _skip_samples(job, step)

        gradient = job.trainer.gradients()
        rejected = job.guard.judge(gradient.loss, gradient.grad_norm, spike_factor)
        if rejected is None:
            result = job.trainer.update(gradient, lr_factor)
            boundary = checks.check_replicas(
                job.comm, step, result.param_norm, job.attention.request(), part=job.trainer.mesh.tensor.rank
            )
            rejected = None if boundary.finite else "non-finite"  # a finite update may overflow
        if rejected is not None:
            rollback.roll_back(
                job, rollback.Trip(step, rejected, gradient.loss, first + job.plan.settings.global_batch)
            )
            continue

        job.guard.accept(result.loss)
        job.losses[step] = result.loss
        if job.log:  # before the step can commit: the log never knows less than the newest checkpoint
            seconds = time.perf_counter() - began
            communication = job.trainer.optimizer.communication_seconds - waited
            row = _row(job, step, result, seconds, communication)
            job.log.write(row)
            table.row(row)
        if len(job.losses) == 1:  # every buffer is there now
            memory = checks.gather_memory(job.comm, job.trainer.optimizer)
            job.event("memory", step, **checks.memory_by_name(memory))
        job.watchdog.beat()
        if job.trainer.data.held_out and (step == last or (eval_every and step % eval_every == 0)):
            _evaluate(job, step, table)
        job.attention.clock.stepped(time.perf_counter() - began)
        _checkpoint(job, step, leaving=step == last or boundary.request != 0)
        if boundary.request and step < last:
            return boundary.request
    return 0


def _inject(job: Job, step: int) -> float:
    """**Collective.** The faults of this step that have not fired in this run; returns the learning rate's factor."""
    factor = 1.0
    for injection in inject.due(job.options.injections, step):
        if job.council.share(partial(inject.claim, job.plan.run_dir, injection)):
            about = {"rank": injection.rank} if injection.rank is not None else {"factor": injection.factor}
            job.event("injection", step, kind=injection.kind, **about)
            inject.strike(injection, job.comm.rank, job.trainer.optimizer.params)
            factor *= injection.factor
    return factor


def _skip_samples(job: Job, step: int) -> int:
    """**Local.** Past the samples that a rollback has excluded, consumed unseen; returns the first of this step."""
    first = job.progress["cursor"]
    job.progress["cursor"] = stop = job.guard.next_cursor(first)
    if stop > first:
        job.event("skip", step, first=first, stop=stop)
    return stop


def _row(job: Job, step: int, result: StepResult, seconds: float, communication: float) -> dict[str, Any]:
    settings = job.plan.settings
    return {
        "step": step,
        "loss": result.loss,
        "lr": result.lr,
        "param_norm": result.param_norm,
        "grad_norm": result.grad_norm,
        "step_seconds": seconds,
        "communication_seconds": communication,
        "tokens_per_second": settings.global_batch * settings.model.seq_len / seconds,
    }


def _evaluate(job: Job, step: int, table: console.StepTable) -> None:
    """**Collective.** Evaluate after `step`, log it and show it."""
    began = time.perf_counter()
    loss, tokens = job.trainer.evaluate()
    job.watchdog.beat()
    if job.log:
        row = {"step": step, "eval_loss": loss, "eval_tokens": tokens, "eval_seconds": time.perf_counter() - began}
        job.log.write({"event": "evaluation", **row})
        table.evaluation(row)


def _checkpoint(job: Job, step: int, *, leaving: bool) -> None:
    """**Collective.** Save if it is due; on leaving in any case."""
    if job.checkpointer.due(step) or leaving:
        about = job.about({"loss": job.losses[step]})
        about["shared"] = leaving  # the next launch may get other nodes
        with job.watchdog.engine():
            job.checkpointer.save(step, job.trainer.state, **about)
