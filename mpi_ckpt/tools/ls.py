"""`ls`: what lies in a run's checkpoint directory, a line a step."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.errors import CheckpointError, NoCheckpoint
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import checkpoints_root, size_of_files

HELP = "list the steps of a run: ranks, bytes, age, state"
DESCRIPTION = """List the steps below RUN_DIR, oldest first. The states:

  committed    a checkpoint
  pinned       a checkpoint that retention never deletes (see `pin`)
  set aside    was found damaged by a restore; no checkpoint any more, kept to be looked at
  unreadable   has a manifest that is not valid: `verify` says why
  uncommitted  files of a save that is under way, or was cut short; the next writer removes them

No file but the manifests is read: `verify` does that."""
EXAMPLE = "python -m mpi_ckpt ls runs/demo"


@dataclass(frozen=True)
class Entry:
    """One step. `ranks` and `created` are None where no readable manifest says them; `nbytes` are then of the files."""

    step: int
    state: str
    ranks: int | None
    nbytes: int
    created: str | None
    directory: str


def list_steps(root: Path) -> list[Entry]:
    """**Local.** Every step below `root` that has a directory, in ascending order."""
    found = sorted([*names.list_steps(root), *names.list_uncommitted(root)])
    entries = [_entry(names.step_dir(root, step), step) for step in found]
    return [entry for entry in entries if Path(entry.directory).is_dir()]  # not those pruned meanwhile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print the list; the exit status."""
    entries = list_steps(checkpoints_root(arguments.run_dir))
    if arguments.json:
        text.print_json([asdict(entry) for entry in entries])
        return status.WELL
    rows = [
        (str(e.step), "?" if e.ranks is None else str(e.ranks), text.size(e.nbytes), text.age(e.created or ""), e.state)
        for e in entries
    ]
    print(text.table(("step", "ranks", "bytes", "age", "state"), rows, left=("state",)))
    return status.WELL


def _entry(directory: Path, step: int) -> Entry:
    state = "committed"
    try:
        if steps.is_set_aside(directory):
            state = "set aside"
            manifest = ShardManifest.from_json((directory / names.DAMAGED_MANIFEST).read_text(errors="replace"))
        else:
            manifest = read_manifest(directory)
    except (CheckpointError, OSError) as error:
        if state == "committed":
            state = "uncommitted" if isinstance(error, NoCheckpoint) else "unreadable"
        return Entry(step, state, None, size_of_files(directory), None, str(directory))
    if state == "committed" and steps.is_pinned(directory):
        state = "pinned"
    nbytes = sum(shard.nbytes for shard in manifest.shards)
    return Entry(step, state, manifest.world_size, nbytes, manifest.created, str(directory))
