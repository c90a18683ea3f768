"""A step that comes back into a run's directory: where it goes, and `run.json`, the run's own file, along with it."""

from __future__ import annotations

from pathlib import Path

from mpi_ckpt.errors import UnusableOption
from mpi_ckpt.storage import atomic
from mpi_ckpt.storage.run_file import RUN_FILE, same_run
from mpi_ckpt.tools.locate import has_steps, new_root


def root_for(run_dir: Path, run_file: bytes | None) -> Path:
    """**Local.** The checkpoints root to write to: a run of the trainer, which has a `run.json`, has its own below the
    run's directory; that of any other program is `run_dir` itself, unless it has a directory `checkpoints`."""
    return new_root(run_dir) if run_file is None or _is_root(run_dir) else run_dir / "checkpoints"


def bring_run_file(run_dir: Path, run_file: bytes | None) -> Path | None:
    """**Local.** Put `run.json` into the run's directory; its path, None where it is there, or nowhere to be had."""
    path = run_dir / RUN_FILE
    if run_file is None or _is_root(run_dir) or path.exists():
        return None
    atomic.write_file(path, run_file)
    return path


def check_same_run(run_dir: Path, run_file: bytes | None, source: object, what: str) -> None:
    """**Local.** Raise UnusableOption, `what`, where `run_dir`, or the directory above it, is another run's than
    `run_file`, which `source` has."""
    for path in (run_dir / RUN_FILE, run_dir.absolute().parent / RUN_FILE):
        if run_file is not None and path.is_file() and not same_run(path.read_bytes(), run_file):
            raise other_run(what, source, path)


def other_run(what: str, source: object, path: object) -> UnusableOption:
    """The error for a `run.json`, `source`, that speaks of another run than the one at `path`."""
    return UnusableOption(
        what,
        path=source,
        found="other settings or data",
        expected=f"those of {path}",
        action="Name where the steps of this run lie, or the directory of that one.",
    )


def _is_root(run_dir: Path) -> bool:
    """Whether it is a checkpoints' own directory, beside which `run.json` has its place, not in it."""
    return run_dir.name == "checkpoints" or has_steps(run_dir)
