"""`ls`: what lies in a run's checkpoint directory, a line a step."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.errors import CheckpointError, InvalidManifest, NoCheckpoint
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import Listed, list_remote, read_upload_manifest
from mpi_ckpt.tools import remote, status, text
from mpi_ckpt.tools.locate import checkpoints_root, size_of_files

HELP = "list the steps of a run: ranks, bytes, age, state"
DESCRIPTION = """List the steps below RUN_DIR, oldest first. The states:

  committed    a checkpoint
  pinned       a checkpoint that retention never deletes (see `pin`)
  set aside    was found damaged by a restore; no checkpoint any more, kept to be looked at
  unreadable   has a manifest that is not valid: `verify` says why
  uncommitted  files of a save that is under way, or was cut short; the next writer removes them

With --remote, the steps of a remote tier: `uncommitted` are the shards of an upload that has not ended.

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


def list_remote_steps(store: ObjectStore) -> list[Entry]:
    """**Local.** Every step of which something lies in the store, in ascending order. Raises RemoteFailed."""
    return [_remote_entry(store, step, listed) for step, listed in list_remote(store).items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    remote.add_place(parser)
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print the list; the exit status."""
    if arguments.remote is not None:
        store = remote.opened(arguments.remote)
        entries = list_remote_steps(store)
        if not entries:
            remote.find_remote(store, None)  # raises: there is nothing
    else:
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


def _remote_entry(store: ObjectStore, step: int, listed: Listed) -> Entry:
    place, stored = f"{store.url}/{names.step_name(step)}", sum(listed.shards.values())
    try:
        manifest = read_upload_manifest(store, step) if listed.committed else None
    except InvalidManifest:
        return Entry(step, "unreadable", None, stored, None, place)
    if manifest is None:
        return Entry(step, "uncommitted", None, stored, None, place)
    nbytes = sum(shard.nbytes for shard in manifest.shards)
    return Entry(step, "committed", manifest.world_size, nbytes, manifest.created, place)
