"""A launch from beginning to end: decide, resume or start, train, check, leave."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi_ckpt.checkpoint.checkpointer import Checkpointer
from mpi_ckpt.checkpoint.local_tier import LocalOptions, steps_on_nodes
from mpi_ckpt.checkpoint.sharded import verify_resume
from mpi_ckpt.comm.agreement import DEFAULT_TIMEOUT, Council
from mpi_ckpt.parallel.mesh import Mesh
from mpi_ckpt.storage import names
from mpi_ckpt.train import checks, console, preemption, rollback, run_copies, status
from mpi_ckpt.train.config import ConfigError, Options, Settings
from mpi_ckpt.train.data import Dataset, open_dataset
from mpi_ckpt.train.guard import Guard
from mpi_ckpt.train.job import Job
from mpi_ckpt.train.loop import train
from mpi_ckpt.train.metrics import MetricsLog
from mpi_ckpt.train.run import (
    CHECKPOINTS,
    Plan,
    check_apart,
    choose_directory,
    local_directory,
    plan_launch,
    store,
)
from mpi_ckpt.train.trainer import Trainer
from mpi_ckpt.train.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

_UPLOADS_AT_THE_END = 5.0  # seconds, of a launch whose time is up


def run(
    comm: MPI.Comm, explicit: dict[str, Any], steps: int | None, options: Options, signals: preemption.Signals
) -> int:
    """**Collective.** One launch of the program; returns its exit status, FINISHED or PREEMPTED.

    `explicit` are the settings on the command line, `steps` the number of steps of the run if it is given there.
    Raises ConfigError, CheckFailed, Diverged or a CheckpointError, the same on every rank.
    """
    council = Council(comm, options.hang_seconds or DEFAULT_TIMEOUT)
    mesh = Mesh(comm, options.tensor_parallel)
    _check_injections(options, comm.size)
    run_dir = council.share(lambda: choose_directory(options))

    def plan_it() -> Plan:
        on_nodes = steps_on_nodes(council, nodes) if nodes else ()
        return council.share(lambda: plan_launch(run_dir, explicit, steps, options, mesh.data.size, run_file, on_nodes))

    # What cannot work is refused here: nothing was made yet.
    nodes = LocalOptions.of(local_directory(run_dir, options), redundancy=options.redundancy)
    council.everywhere(lambda: check_apart(run_dir, nodes.place(comm.rank).directory) if nodes else None)
    run_file = council.share(lambda: run_copies.find(run_dir, options.remote))
    if nodes:
        run_copies.check_nodes(council, run_dir, run_file, nodes)
    plan = plan_it()
    mesh.check_model(plan.settings.model.n_head)
    data = council.everywhere(lambda: _open_data(plan))

    clock = preemption.Clock(options.time_limit_seconds, os.environ)
    watchdog = Watchdog(options.hang_seconds, comm)
    log: MetricsLog | None = None
    happened: dict[str, dict[str, Any]] = {}

    def on_event(event: dict[str, Any]) -> None:
        happened[event["event"]] = event
        if event["event"] == "commit":
            clock.committed(event["commit_seconds"])
        if log:
            log.write(event)

    with _open_checkpointer(run_dir, comm, options, council.timeout, on_event) as checkpointer:
        plan, before = plan_it(), plan  # another launch may have begun the run, or gone on, until the lock was ours
        if (plan.settings, plan.stored_data) != (before.settings, before.stored_data):
            data = council.everywhere(lambda: _open_data(plan))
        log = council.everywhere(lambda: MetricsLog(run_dir) if comm.rank == 0 else None)
        attention = council.everywhere(lambda: preemption.Attention(signals, run_dir, clock, leads=comm.rank == 0))
        council.share(lambda: store(plan, data.identity))

        def build() -> Trainer:
            return Trainer.build(comm, plan.settings, data, mesh)

        job = Job(
            comm, council, plan, options, build, build(), checkpointer, attention, watchdog, log, happened=happened
        )
        watchdog.on_hang = lambda seconds: job.event("hang", job.progress["step"], seconds=seconds)
        first = _resume(job) + 1
        if nodes:
            run_copies.keep(council, run_dir, nodes)  # not before it is known whose steps lie there
        job.event("launch", first - 1, ranks=comm.size, mesh=mesh.shape, settings=plan.settings.to_json())
        outcome = _train(job, first)
        watchdog.close()  # what is left may wait for a network, and has its own limits
    if log:
        log.close()
    mesh.close()
    council.close()
    return outcome


def _open_checkpointer(
    run_dir: Path, comm: MPI.Comm, options: Options, timeout: float, on_event: Callable[[dict[str, Any]], None]
) -> Checkpointer:
    """**Collective.** The run's, which is this launch's alone from now on."""
    return Checkpointer(
        run_dir / CHECKPOINTS,
        comm,
        every=options.ckpt_every,
        mean_time_between_failures=options.mtbf,
        keep=options.keep,
        async_io=options.async_io,
        timeout=timeout,
        on_event=on_event,
        remote=options.remote,
        remote_keep=options.remote_keep,
        remote_bandwidth=options.remote_bytes_per_second,
        before_upload=(lambda store: run_copies.admit(store, run_dir)) if options.remote else None,
        local=local_directory(run_dir, options),
        redundancy=options.redundancy,
        local_keep=options.local_keep,
        shared_every=options.shared_every,
    )


def _train(job: Job, first: int) -> int:
    """**Collective.** From step `first` on: train, then check what was done, or leave early; the exit status."""
    plan, speaks = job.plan, job.comm.rank == 0
    if first <= plan.last_step:
        asked = job.council.agree(job.attention.request, lambda requests: next(filter(None, requests), 0))
        if not asked:
            every = job.options.log_every or max(1, (plan.last_step - first + 1) // 20)
            with console.StepTable(first, plan.last_step, every, enabled=speaks) as table:
                asked = train(job, table)
        if asked:
            return _leave(job, preemption.REASONS[asked])
        _check_results(job)
    elif speaks:
        print(f"{plan.run_dir}: step {plan.last_step} is done already; nothing to train")
    reason = "finished" if plan.last_step == plan.steps else "stop-at"
    job.event("finish", max(first - 1, plan.last_step), reason=reason)
    return status.FINISHED


def _leave(job: Job, reason: str) -> int:
    """**Collective.** Early, with everything committed that was done."""
    job.checkpointer.upload_timeout = _UPLOADS_AT_THE_END  # the next launch goes on with what is not there by then
    with job.watchdog.engine():
        job.checkpointer.wait_until_finished()
        job.council.share(job.attention.remove_halt_file)
    step = job.progress["step"]
    job.event("preemption", step, reason=reason)
    if job.comm.rank == 0:
        print(f"leaving after step {step} ({reason}); the same command line continues the run", flush=True)
    return status.PREEMPTED


def _open_data(plan: Plan) -> Dataset:
    settings = plan.settings
    data = open_dataset(
        settings.data,
        settings.model.seq_len,
        settings.seed,
        vocab_size=settings.model.vocab_size,
        total_tokens=settings.corpus_tokens,
        held_out=settings.eval_samples,
    )
    if plan.stored_data is not None:
        data.identity.check_unchanged(plan.stored_data)
    return data


def _resume(job: Job) -> int:
    """**Collective.** Restore what there is; returns the step after which training continues, 0 for none."""
    plan = job.plan
    if plan.resume_from is None:
        interrupted = job.council.share(lambda: rollback.pending(plan.run_dir))
        if interrupted is not None:
            return rollback.carry_out(job, interrupted)
    found = job.restore(plan.resume_from)
    if found is None:
        return 0
    if plan.resume_from is not None:
        job.checkpointer.discard_after(found.step)
        job.council.share(lambda: rollback.forget(plan.run_dir))
    job.guard = Guard.from_json(found.meta.get("guard"))
    if job.comm.rank == 0:
        print(console.resumed(plan.run_dir, found.step, job.happened), flush=True)
    return found.step


def _check_results(job: Job) -> None:
    """**Collective.** The checks at the end of a launch, and their report."""
    comm, checkpointer, plan = job.comm, job.checkpointer, job.plan
    job.council.everywhere(lambda: checks.check_optimizer_bytes(job.trainer.optimizer, comm.rank))
    memory = checks.gather_memory(comm, job.trainer.optimizer)
    with job.watchdog.engine():
        checkpointer.wait_until_finished()
        manifest = verify_resume(job.trainer.state, checkpointer.root, plan.last_step, comm)
    job.event("memory", plan.last_step, **checks.memory_by_name(memory))
    if comm.rank == 0:
        console.print_memory(memory, job.trainer.optimizer.params.size * job.trainer.mesh.tensor.size)
        console.print_manifest(manifest, names.step_dir(checkpointer.root, plan.last_step))
        print(f"resume verified: step {plan.last_step} read back is the state in memory, bit for bit, on every rank")
    whole_default_run = plan.fresh and len(job.losses) == 20 and _is_default(plan.settings, job.trainer.mesh.data.size)
    if whole_default_run and not job.guard.rollbacks:
        checks.check_loss_falls(list(job.losses.values()))


def _check_injections(options: Options, ranks: int) -> None:
    for injection in options.injections:
        if injection.rank is not None and injection.rank >= ranks:
            raise ConfigError(
                f"inject cannot be used: {injection.kind} has no rank to hit",
                found=f"rank {injection.rank}",
                expected=f"a rank from 0 to {ranks - 1}",
            )


def _is_default(settings: Settings, ranks: int) -> bool:
    return settings == Settings(global_batch=4 * ranks, seed=settings.seed)
