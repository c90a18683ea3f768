"""A run's directory: `run.json` (what the run is), `metrics.jsonl` (what happened), `checkpoints/`.

Rank 0 decides here what a launch is to do; the other ranks are told.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import steps as step_directories
from mpi_ckpt.checkpoint.tiers import Tiers
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.run_file import RUN_FILE
from mpi_ckpt.train.config import ConfigError, Options, Settings, resolve
from mpi_ckpt.train.data import DataIdentity

CHECKPOINTS = "checkpoints"
DEFAULT_STEPS = 20


@dataclass(frozen=True)
class Plan:
    """What this launch does: train `settings` up to step `steps` of the run, from `resume_from` or from the start."""

    run_dir: Path
    run_id: str | None  # drawn by the first launch; None for a run that is older than ids are
    settings: Settings
    steps: int
    fresh: bool  # no step of this run is committed
    stored_data: DataIdentity | None  # of the data that the run was started with
    resume_from: int | None  # a step that was asked for; None is the newest
    last_step: int  # of this launch


def choose_directory(options: Options) -> Path:
    """**Local.** The run's directory, which need not be there yet; a new `runs/<time>` when none was named."""
    if options.run_dir is not None:
        run_dir = Path(options.run_dir)
        if run_dir.exists() and not run_dir.is_dir():
            found, expected = "a file", "a directory"
            raise ConfigError(
                "run_dir is not a directory", path=run_dir, found=found, expected=expected, action="Name another one."
            )
        return run_dir
    stem = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    run_dir, attempt = stem, 1
    while run_dir.exists():
        attempt += 1
        run_dir = stem.with_name(f"{stem.name}-{attempt}")
    return run_dir


def local_directory(run_dir: Path, options: Options) -> str | None:
    """The run's own part of the nodes' directories, which other runs use too; None without a tier there."""
    return f"{options.local}/{run_dir.resolve().name}" if options.local else None


def check_apart(run_dir: Path, local: str) -> None:
    """**Local.** Raise ConfigError where the nodes' directory is a part of the run's directory that has its own use."""
    if Path(local).resolve() in (run_dir.resolve(), (run_dir / CHECKPOINTS).resolve()):
        raise ConfigError(
            "local cannot be used: the checkpoints of the nodes would lie among those of the run's directory",
            path=local,
            found=f"a directory of {run_dir}",
            expected="one on the nodes' own disks",
            action="Give another --local.",
        )


def plan_launch(
    run_dir: Path,
    explicit: dict[str, Any],
    steps: int | None,
    options: Options,
    ranks: int,
    run_file: bytes | None,
    on_nodes: Sequence[int] = (),
) -> Plan:
    """**Local.** What to do in `run_dir`; `on_nodes` are the steps that lie on nodes, wherever else.

    `run_file` is a copy of the run's own file, for a directory that has lost it.

    Raises ConfigError when the request and what lies there do not agree.
    """
    stored = _read(run_dir) or (_parse(run_file, run_dir / RUN_FILE) if run_file else None)
    _check_no_bare_steps(run_dir)
    committed = sorted({*on_nodes, *Tiers(run_dir / CHECKPOINTS, options.remote).list_steps()})
    anything = committed or step_directories.list_set_aside(run_dir / CHECKPOINTS)
    if options.resume == "never" and (stored or anything):
        raise ConfigError(
            "the directory holds a run, and --resume never was given",
            path=run_dir,
            found=f"{len(committed)} committed step(s)" if committed else "a run without a committed step",
            expected="a directory without a run",
            action="Give another --run-dir, or continue with --resume auto.",
        )
    if anything and stored is None:
        raise _without_settings(run_dir)
    _check_resume_step(run_dir, committed, options)
    _check_steps(run_dir, committed, steps, options)
    settings = resolve(explicit, stored.settings if stored else None, ranks)
    total = steps or (stored.steps if stored else DEFAULT_STEPS)
    if stored is None:
        settings = settings.completed(total, evaluates=options.eval_every is not None)
    elif options.eval_every and not settings.eval_samples:
        raise ConfigError(
            "eval_every cannot be used: this run holds no samples out",
            path=run_dir / RUN_FILE,
            found="eval_samples 0",
            expected="at least 1, from the first launch on: the order of the training samples depends on it",
            action="Leave --eval-every out, or start a new run in another directory.",
        )
    return Plan(
        run_dir=run_dir,
        run_id=stored.run_id if stored else names.new_save_id(),
        settings=settings,
        steps=total,
        fresh=not anything,
        stored_data=stored.data if stored else None,
        resume_from=options.resume_step,
        last_step=min(total, options.stop_at or total),
    )


def _without_settings(run_dir: Path) -> ConfigError:
    return ConfigError(
        "the directory holds checkpoints, but not the settings of their run",
        path=run_dir / RUN_FILE,
        found="no such file",
        expected="the file that the first launch wrote",
        action="Restore it from a copy of the run's directory, or start a new run in another one.",
    )


def _check_no_bare_steps(run_dir: Path) -> None:
    """What `import`, `reshard` or `scavenge` wrote may lie here, where no launch would look for it."""
    bare = names.list_steps(run_dir)
    if bare:
        raise ConfigError(
            "the directory is a root of checkpoints, not a run's directory",
            path=run_dir,
            found=f"step {bare[-1]} directly in it",
            expected=f"steps in {CHECKPOINTS}/ below it, and {RUN_FILE}",
            action=f"To go on from them, move the step directories into {run_dir / CHECKPOINTS} and copy the run's "
            f"{RUN_FILE} into {run_dir}; or name another --run-dir, and the run's --remote, if it has one. (An "
            "imported model has no optimizer state.)",
        )


def _check_steps(run_dir: Path, committed: list[int], steps: int | None, options: Options) -> None:
    """A run may be made longer, and shorter as long as it is not beyond the new end."""
    reached = options.resume_step or max(committed, default=0)
    if steps is not None and steps < reached:
        raise ConfigError(
            "the run is beyond --steps already",
            path=run_dir / CHECKPOINTS,
            found=f"--steps {steps}, and step {reached} is committed",
            expected=f"at least {reached}",
            action="Leave --steps out; to go back, --resume STEP --discard-later.",
        )


def _check_resume_step(run_dir: Path, committed: list[int], options: Options) -> None:
    wanted = options.resume_step
    if wanted is None:
        return
    found = f"steps {', '.join(map(str, committed))}" if committed else "no committed step"
    if wanted not in committed:
        raise ConfigError(
            f"step {wanted} cannot be resumed: it is not committed",
            path=run_dir / CHECKPOINTS,
            found=found,
            expected=f"step {wanted}",
            action="Name a committed step, or use --resume auto.",
        )
    if wanted < committed[-1] and not options.discard_later:
        raise ConfigError(
            f"resuming from step {wanted} would leave later steps behind it",
            path=run_dir / CHECKPOINTS,
            found=found,
            expected=f"no step after {wanted}",
            action="Add --discard-later to delete them, or resume from the newest.",
        )


@dataclass(frozen=True)
class _Stored:
    run_id: str | None
    settings: Settings
    steps: int
    data: DataIdentity


def _read(run_dir: Path) -> _Stored | None:
    path = run_dir / RUN_FILE
    try:
        return _parse(path.read_bytes(), path)
    except FileNotFoundError:
        return None


def _parse(data: bytes, path: Path) -> _Stored:
    try:
        document = json.loads(data)
        return _Stored(
            document.get("run_id"),
            Settings.from_json(document["settings"]),
            int(document["steps"]),
            DataIdentity(**document["data"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "the settings of the run cannot be read",
            path=path,
            found=f"{type(error).__name__}: {error}",
            expected="the file that the first launch wrote",
            action="Restore it from a copy, such as those in the remote tier and on the nodes, or start a new run in "
            "another directory.",
        ) from error


def store(plan: Plan, data: DataIdentity) -> None:
    """**Local.** Write `run.json`: before the first step of a run, and when the number of steps was changed."""
    stored = _read(plan.run_dir)
    document = {
        **({} if plan.run_id is None else {"run_id": plan.run_id}),
        "settings": plan.settings.to_json(),
        "steps": plan.steps,
        "data": dataclasses.asdict(plan.stored_data or data),
    }
    if stored is None or stored.steps != plan.steps:
        atomic.write_file(plan.run_dir / RUN_FILE, (json.dumps(document, indent=2) + "\n").encode())
