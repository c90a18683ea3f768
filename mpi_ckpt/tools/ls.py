"""`ls`: what lies in a run's checkpoint directory, a line a step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.errors import CheckpointError, InvalidManifest, NoCheckpoint
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.remote_steps import Listed, find_remote, list_remote, read_upload_manifest
from mpi_ckpt.tools import nodes, remote, status, text
from mpi_ckpt.tools.locate import checkpoints_root, size_of_files

HELP = "list the steps of a run: ranks, bytes, age, state"
DESCRIPTION = """List the steps below RUN_DIR, oldest first. The states:

  committed    a checkpoint
  pinned       a checkpoint that retention never deletes (see `pin`)
  set aside    was found damaged by a restore; no checkpoint any more, kept to be looked at
  unreadable   has a manifest that is not valid: `verify` says why
  uncommitted  files of a save that is under way, or was cut short; the next writer removes them

With --remote, the steps of a remote tier: `uncommitted` are the shards of an upload that has not ended. Of nodes' own
directories (--local, or one in the place of RUN_DIR) `ranks` says of how many ranks a shard lies there: a manifest on
any node commits the step for all. Beside RUN_DIR, which is not read then, --local may be what the trainer has, without
the name of the run.

No file but the manifests is read: `verify` does that."""
EXAMPLE = """python -m mpi_ckpt ls runs/demo
  python -m mpi_ckpt ls --local /mnt/node*/ckpt/demo"""
_STATES = ("pinned", "committed", "unreadable", "set aside", "uncommitted")  # of several nodes the first one counts


@dataclass(frozen=True)
class Entry:
    """One step. `ranks` and `created` are None where no readable manifest says them; `nbytes` are then of the files.

    On nodes `nbytes` are of the files in any case, redundancy among them, and `here` is the number of shards.
    """

    step: int
    state: str
    ranks: int | None
    nbytes: int
    created: str | None
    directory: str
    here: int | None = None


def list_steps(root: Path) -> list[Entry]:
    """**Local.** Every step below `root` that has a directory, in ascending order."""
    found = sorted([*names.list_steps(root), *names.list_uncommitted(root)])
    entries = [_entry(names.step_dir(root, step), step) for step in found]
    return [entry for entry in entries if Path(entry.directory).is_dir()]  # not those pruned meanwhile


def list_on_nodes(local: Sequence[Path]) -> list[Entry]:
    """**Local.** Every step of which something lies in the nodes' directories, in ascending order."""
    found = ((step, [names.step_dir(node, step) for node in local]) for step in nodes.all_steps(local))
    return [_on_nodes(step, [directory for directory in each if directory.is_dir()]) for step, each in found]


def list_remote_steps(store: ObjectStore) -> list[Entry]:
    """**Local.** Every step of which something lies in the store, in ascending order. Raises RemoteFailed."""
    return [_remote_entry(store, step, listed) for step, listed in list_remote(store).items()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    remote.add_place(parser)
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print the list; the exit status."""
    remote.check_place(arguments)
    if arguments.remote is not None:
        store = remote.opened(arguments.remote)
        entries = list_remote_steps(store)
        if not entries:
            find_remote(store, None)  # raises: there is nothing
    elif local := nodes.named(arguments):
        entries = list_on_nodes(local)
        if not entries:
            raise nodes.no_step(local, None, ())
    else:
        entries = list_steps(checkpoints_root(arguments.run_dir))
    if arguments.json:
        text.print_json([asdict(entry) for entry in entries])
        return status.WELL
    rows = [(str(e.step), _ranks(e), text.size(e.nbytes), text.age(e.created or ""), e.state) for e in entries]
    if arguments.local:
        print(nodes.heading(arguments))
    print(text.table(("step", "ranks", "bytes", "age", "state"), rows, left=("state",)))
    return status.WELL


def _ranks(entry: Entry) -> str:
    ranks = "?" if entry.ranks is None else str(entry.ranks)
    return ranks if entry.here is None else f"{entry.here} of {ranks}"


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


def _on_nodes(step: int, directories: list[Path]) -> Entry:
    """What the nodes' directories of a step hold together."""
    entries = [_entry(directory, step) for directory in directories]
    best = min(entries, key=lambda entry: _STATES.index(entry.state))
    nbytes = sum(map(size_of_files, directories))
    shards = (names.parse_shard(path.name) for directory in directories for path in names.own_files(directory))
    return replace(best, nbytes=nbytes, here=len({shard[0] for shard in shards if shard is not None}))


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
