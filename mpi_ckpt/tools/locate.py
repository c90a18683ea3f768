"""From what a user names on the command line to the checkpoints root, or the step, that is meant."""

from __future__ import annotations

import contextlib
import glob
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpi_ckpt.checkpoint.local_tier import DOMAIN_PLACEHOLDER
from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.errors import CheckpointError, CorruptShard, MissingShard, NoCheckpoint
from mpi_ckpt.redundancy.descriptor import DESCRIPTOR_SUFFIX
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.run_file import RUN_FILE


def checkpoints_root(place: Path) -> Path:
    """**Local.** The checkpoints root of a run directory, or `place` itself if it holds steps.

    Raises NoCheckpoint when it is neither.
    """
    for root in (place / "checkpoints", place):
        if has_steps(root):
            return root
    run = run_of(place)
    if (run / RUN_FILE).is_file():
        raise NoCheckpoint(
            "the run has no checkpoints here",
            path=place,
            found=f"{RUN_FILE}, but no step_NNNNNNNN directory",
            expected="a step in the run's shared directory",
            action="Its steps may be on the nodes or in the remote tier: look with "
            f"`python -m mpi_ckpt ls {quoted(run)} --local DIR ...` or `python -m mpi_ckpt ls --remote URL`, with the "
            "--local or --remote of the training command; `scavenge` and `pull` bring them here.",
        )
    error = NoCheckpoint(
        "there are no checkpoints here",
        path=place,
        found="no step_NNNNNNNN directory in it, nor in a `checkpoints` directory below it",
        expected="a run's directory, or the directory of its checkpoints",
        action="Name the --run-dir of the training command, or the root given to Checkpointer.",
    )
    raise naming_runs(error, [place])


def naming_runs(error: NoCheckpoint, places: Sequence[Path]) -> NoCheckpoint:
    """**Local.** The same error; with the runs that lie right below the places, if any: one of them was meant."""
    inside = (path for place in places if place.is_dir() for path in sorted(place.iterdir()))
    runs = [path for path in inside if any(map(has_steps, (path / "checkpoints", path)))]
    if runs:
        error.found = "runs: " + ", ".join(sorted({run.name for run in runs}))
        error.action = f"Name {runs[0]}{' and its like' if len(places) > 1 else ''}."
    return error


def run_of(root: Path) -> Path:
    """The run's directory of a checkpoints root, or of itself; the root where that is all that is known."""
    return root.parent if root.name == "checkpoints" else root


def quoted(place: Path) -> str:
    """As a shell takes it."""
    return shlex.quote(str(place))


def has_steps(root: Path) -> bool:
    """**Local.** Whether steps lie right in this directory, committed or not."""
    return root.is_dir() and bool(names.list_steps(root) or names.list_uncommitted(root))


def nodes_of(given: Sequence[Path], run_dir: Path | None = None) -> list[Path]:
    """**Local.** The nodes' directories of a run, from these themselves or from what the trainer was given as --local.

    `{domain}` stands for every name that there is. Where no steps lie right in a directory, the one in it that has the
    name of the run `run_dir` is meant, if steps lie there. Raises NoCheckpoint where `{domain}` stands for nothing.
    """
    found = dict.fromkeys(place for each in given for place in _of_all_domains(each))  # each once, in this order
    if run_dir is None:
        return list(found)
    name = run_of(run_dir.resolve()).name
    return [place / name if has_steps(place / name) and not has_steps(place) else place for place in found]


def _of_all_domains(place: Path) -> list[Path]:
    if DOMAIN_PLACEHOLDER not in str(place):
        return [place]
    pattern = "*".join(map(glob.escape, str(place).split(DOMAIN_PLACEHOLDER)))
    found = sorted(path for path in map(Path, glob.glob(pattern)) if path.is_dir())
    if not found:
        raise NoCheckpoint(
            "there are no directories of nodes here",
            path=place,
            found=f"no directory {pattern}",
            expected=f"at least one, with the name of a failure domain in the place of {DOMAIN_PLACEHOLDER}",
            action="Name --local as the training command has it; see whether the nodes' disks can be seen from here.",
        )
    return found


def new_root(place: Path) -> Path:
    """**Local.** The checkpoints root to write to: that of a run directory if `place` is one, else `place` itself."""
    return place / "checkpoints" if (place / "checkpoints").is_dir() else place


def find_whole(run_dir: Path, step: int | None) -> Path:
    """**Local.** The directory of a committed step (None: the newest) that holds all of its shards.

    Raises NoCheckpoint; CheckpointError for a node's own directory, which holds some.
    """
    return _check_whole(find_committed(checkpoints_root(run_dir), step))


def step_of(text: str) -> Path:
    """**Local.** The committed step that `text` names: a step's directory, RUN_DIR (its newest), or RUN_DIR:STEP.

    Raises what `find_whole` does.
    """
    place = Path(text)
    step = names.parse_step(place.resolve().name)
    if step is not None and place.is_dir():
        return _check_whole(find_committed(place.resolve().parent, step))
    run_dir, colon, number = text.rpartition(":")
    if colon and number.isdecimal() and not place.exists():
        return find_whole(Path(run_dir), int(number))
    return find_whole(place, None)


def _check_whole(directory: Path) -> Path:
    if is_of_node(directory):
        manifest = read_manifest(directory)
        here = [shard for shard in manifest.shards if (directory / shard.path).exists()]
        if len(here) < manifest.world_size:
            raise CheckpointError(
                "a node's own directory holds a part of the step alone",
                path=directory,
                found=f"{len(here)} of {manifest.world_size} shards",
                expected="a directory with all shards of the step",
                action="Bring them together by `python -m mpi_ckpt scavenge --local DIR ... --out RUN`, and name RUN.",
            )
    return directory


def are_of_node(root: Path) -> bool:
    """**Local.** Whether the steps below `root` lie on a node's own disk."""
    return any(
        is_of_node(names.step_dir(root, step)) for step in (*names.list_steps(root), *names.list_uncommitted(root))
    )


def is_of_node(directory: Path) -> bool:
    """**Local.** Whether a step's directory is on a node's own disk: redundancy is described nowhere else."""
    return any(path.name.endswith(DESCRIPTOR_SUFFIX) for path in names.own_files(directory))


def save_id_of(directory: Path) -> str | None:
    """**Local.** Which save the step's directory holds now; None where it holds none, or none that can be read."""
    try:
        return read_manifest(directory).save_id
    except CheckpointError:
        return None


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """**Local.** Around reading a step: what a writer beside it has pruned or replaced meanwhile is no damage.

    Raises NoCheckpoint then, and whatever the reading raises otherwise.
    """
    before = save_id_of(directory)
    try:
        yield
    except (MissingShard, CorruptShard, NoCheckpoint, FileNotFoundError) as error:
        if before is None or save_id_of(directory) == before:
            raise
        raise NoCheckpoint(
            "the step was pruned or replaced while it was being read",
            path=directory,
            found=f"no longer save {before}",
            expected="a step that stays",
            action=f"Take a newer step, or pin one first (`python -m mpi_ckpt pin {quoted(directory.parent)} STEP`).",
        ) from error


def size_of_files(directory: Path) -> int:
    """**Local.** Bytes of our files in a step's directory, whatever state it is in."""
    nbytes = 0
    for path in names.own_files(directory):
        with contextlib.suppress(FileNotFoundError):  # a save under way renames its files
            nbytes += path.lstat().st_size
    return nbytes
