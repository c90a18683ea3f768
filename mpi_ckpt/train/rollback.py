"""Going back after a rejected step, so that a kill at any moment changes nothing.

    drain     the save in flight commits                                          (all agree on what is committed)
    intend    rank 0 writes `rollback.json`: where to, and what is to be remembered
    discard   the steps after the target, the highest first
    restore   the target, on every rank
    commit    the target again, with the new skip set, count and window in its meta
    forget    `rollback.json` is removed; only now does training go on

Killed before the intention is there, nothing has happened, and the next launch meets the rejected step again. Killed
after it, the next launch does the rest, which may be done any number of times.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from mpi_ckpt.storage import atomic
from mpi_ckpt.train.config import ConfigError
from mpi_ckpt.train.guard import Diverged, Guard, Interval, choose_target, merged
from mpi_ckpt.train.job import Job

INTENTION_FILE = "rollback.json"
LOWER = 0.5  # of the learning rate, a rollback with `--on-spike lower-lr`


@dataclass(frozen=True)
class Trip:
    """A rejected step."""

    step: int
    reason: str  # "non-finite" or "spike"
    loss: float
    stop: int  # cursor behind its batch


@dataclass(frozen=True)
class Intention:
    """A rollback that is to be done, whoever does it."""

    step: int  # that was rejected
    reason: str
    action: str  # "skip" or "lower-lr"
    target: int
    stop: int
    lr_scale: float
    rollbacks: int  # this one included
    skip: list[Interval]  # that of the model before the rollback


def roll_back(job: Job, trip: Trip) -> None:
    """**Collective.** Back to an older step of the run, as `--on-spike` says. Raises Diverged where that is no help."""
    with job.watchdog.engine():
        job.checkpointer.wait_until_finished()
    _check_allowed(job, trip)
    action = job.options.on_spike
    intention = Intention(
        step=trip.step,
        reason=trip.reason,
        action=action,
        target=choose_target(job.checkpointer.all_steps(), job.guard.target),
        stop=trip.stop,
        lr_scale=job.progress["lr_scale"] * (LOWER if action == "lower-lr" else 1.0),
        rollbacks=job.guard.rollbacks + 1,
        skip=job.guard.skip,
    )
    path = job.plan.run_dir / INTENTION_FILE
    job.council.share(lambda: atomic.write_file(path, json.dumps(dataclasses.asdict(intention))))
    carry_out(job, intention)


def carry_out(job: Job, intention: Intention) -> int:
    """**Collective.** Everything after the intention; returns the step after which training goes on."""
    with job.watchdog.engine():
        job.checkpointer.discard_after(intention.target)
    found = job.restore()
    if found is None:  # nothing was committed yet: from the beginning
        job.trainer = job.build()
    step = found.step if found else 0

    job.guard = Guard.from_json(found.meta.get("guard") if found else None)  # the window is the target's
    job.guard.rollbacks, job.guard.target, job.guard.skip = intention.rollbacks, step, intention.skip
    if intention.action == "skip":
        job.guard.skip = merged(intention.skip, job.progress["cursor"], intention.stop)
    job.progress["lr_scale"] = intention.lr_scale
    about = job.about(dict(found.manifest.metrics) if found else {})
    with job.watchdog.engine():
        job.checkpointer.save(step, job.trainer.state, overwrite=found is not None, **about)
        job.checkpointer.wait_until_finished()

    names = {"target": step, "reason": intention.reason, "action": intention.action}
    skipped = [list(interval) for interval in job.guard.skip]
    job.event("rollback", intention.step, **names, rollbacks=intention.rollbacks, skipped=skipped)
    if job.comm.rank == 0:
        print(f"step {intention.step} rejected ({intention.reason}): back to step {step}", flush=True)
    job.council.share(lambda: forget(job.plan.run_dir))
    return step


def pending(run_dir: Path) -> Intention | None:
    """**Local.** The rollback that the last launch did not finish. Raises ConfigError for a file that is not ours."""
    path = run_dir / INTENTION_FILE
    try:
        stored = json.loads(path.read_text())
        return Intention(**stored | {"skip": [(first, stop) for first, stop in stored["skip"]]})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the unfinished rollback of the last launch cannot be read",
            path=path,
            found=f"{type(error).__name__}: {error}",
            expected="the file that it wrote",
            action="Choose a step yourself, with --resume STEP --discard-later.",
        ) from error


def forget(run_dir: Path) -> None:
    """**Local.** No rollback is to be done any more."""
    atomic.remove(run_dir / INTENTION_FILE, missing_ok=True)


def _check_allowed(job: Job, trip: Trip) -> None:
    options, done = job.options, job.guard.rollbacks
    if options.guard and options.on_spike != "stop" and done < options.max_rollbacks:
        return
    if not options.guard:
        why, action = "--no-guard was given", "Continue with --guard, or from an older step with other settings."
    elif options.on_spike == "stop":
        why, action = "--on-spike stop was given", "Continue with --on-spike skip or lower-lr."
    else:
        why = f"{done} rollbacks, as many as --max-rollbacks allows"
        action = "Look at the data and the learning rate; raise --max-rollbacks to try on."
    raise Diverged(
        f"training diverged at step {trip.step} ({trip.reason})",
        found=f"loss {trip.loss:.4g}; {why}",
        expected="a finite loss and gradient" if trip.reason == "non-finite" else "a loss near those before it",
        action=action + " The checkpoints are those of before the step.",
    )
