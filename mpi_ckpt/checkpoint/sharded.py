"""The plain functions under the Checkpointer: one step out, one step in, and the proof that they agree."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpi_ckpt.checkpoint import commit, restore, snapshot, values
from mpi_ckpt.checkpoint.arguments import plain_index
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions
from mpi_ckpt.checkpoint.ownership import Ownership
from mpi_ckpt.checkpoint.state import Leaves, PerRank, State, walk
from mpi_ckpt.checkpoint.tiers import Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CorruptShard, NoCheckpoint, WorldSizeMismatch
from mpi_ckpt.layout import Shard
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest

if TYPE_CHECKING:
    from mpi4py import MPI


def save_sharded(
    state: State,
    directory: str | Path,
    step: int,
    comm: MPI.Comm,
    *,
    meta: dict[str, Any] | None = None,
    index: dict[str, tuple[int, tuple[int, ...]]] | None = None,
    overwrite: bool = False,
) -> Path:
    """**Collective.** Save `state` as `step` below the checkpoints root `directory`; returns the step's directory.

    Synchronous: when it returns, the step is committed and durable. Takes the writer's lock for the time of the save.
    Raises what `Checkpointer.save` raises.
    """
    root = Path(directory)
    council = Council(comm)
    owned: list[Ownership] = []
    try:
        owned.append(Ownership(root, council))
        taken: list[snapshot.Snapshot] = []

        def stage() -> snapshot.Description:
            taken.append(snapshot.take(walk(state), council.rank))
            return taken[0].description

        nbytes = council.agree(stage, snapshot.check_agreement)
        named = council.share(lambda: plain_index(index or {}, taken[0].description.arrays))
        request = commit.Request(root, step, owned[0].launch_id, nbytes, overwrite, meta or {}, named)
        commit.commit(council, request, taken[0])
        return request.directory
    finally:
        for ownership in owned:
            ownership.release()
        council.close()


def load_sharded(
    directory: str | Path, expected_world_size: int, comm: MPI.Comm, step: int | None = None
) -> tuple[State, ShardManifest]:
    """**Collective.** This rank's state of the newest committed step, or of `step`, and the step's manifest.

    The state is new memory: nested dicts with `Shard`s (lists of them where a rank owns several blocks), replicated
    arrays, plain values and `PerRank`s, as they were saved by this rank. Every file is verified against its sha256.
    Raises NoCheckpoint, WorldSizeMismatch, MissingShard, CorruptShard, InvalidManifest, the same on every rank.
    """
    root = Path(directory)
    council = Council(comm)
    try:
        if expected_world_size != council.size:
            raise WorldSizeMismatch(
                "the caller expects another number of ranks than its communicator has",
                path=root,
                found=f"{council.size} ranks in the communicator",
                expected=f"{expected_world_size} ranks",
            )
        built: list[State] = []

        def template(opened: Opened) -> Leaves:
            state, leaves = _empty_state(opened, council.rank)
            built.append(state)
            return leaves

        opened = restore.restore(council, Tiers(root), template, RestoreOptions(step=step), set_aside=False)
        if opened is None:
            raise NoCheckpoint("there is no committed step", path=root, expected="a step with a manifest.json")
        return built[0], opened.manifest
    finally:
        council.close()


def verify_resume(state: State, directory: str | Path, step: int, comm: MPI.Comm) -> ShardManifest:
    """**Collective.** Read `step` back and raise CorruptShard unless it is `state`, bit for bit, on every rank.

    Arrays are compared by the sha256 of their bytes, values by their encoded form. Returns the step's manifest.
    """
    council = Council(comm)
    try:
        saved, manifest = load_sharded(directory, council.size, comm, step)

        def compare() -> None:
            mine, theirs = digests(state), digests(saved)
            wrong = [key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)]
            if wrong:
                raise CorruptShard(
                    "the step read back is not the state in memory",
                    path=names.step_dir(Path(directory), step),
                    rank=council.rank,
                    found=f"other bytes at {', '.join(sorted(wrong))}",
                    expected="bit-identical arrays and values",
                    action="Do not continue from this step; look at memory and disk of this rank's node.",
                )

        council.everywhere(compare)
        return manifest
    finally:
        council.close()


def digests(state: State) -> dict[str, str]:
    """**Local.** sha256 of every leaf of this rank's state, by key (and position, in a list of shards)."""
    leaves = walk(state)
    found = {
        f"{key}[{position}]": _digest(shard.array)
        for key, shards in leaves.shards.items()
        for position, shard in enumerate(shards)
    }
    found |= {key: _digest(array) for key, array in leaves.arrays.items()}
    for key, (parent, name) in leaves.values.items():
        found[key] = hashlib.sha256(values.dumps(values.encode(key, parent[name]))).hexdigest()
    for key, leaf in leaves.per_rank.items():
        found[key] = hashlib.sha256(values.dumps(values.encode(key, leaf.value))).hexdigest()
    return found


def _digest(array: np.ndarray) -> str:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(little.reshape(-1).view(np.uint8).data).hexdigest()


def _empty_state(opened: Opened, rank: int) -> tuple[State, Leaves]:
    """A state of the checkpoint's structure, and its leaves, for the rank that saved it."""
    state, leaves = State(), Leaves()
    for key, array in opened.manifest.arrays.items():
        parent, name = _place(state, key)
        if array.replicated:
            parent[name] = leaves.arrays[key] = np.empty(array.shape, array.dtype)
        else:
            blocks = opened.manifest.shards[rank].blocks.get(key, ())
            shards = [Shard(np.empty(b.shape, array.dtype), b.start, array.shape) for b in blocks]
            leaves.shards[key] = shards
            parent[name] = shards[0] if len(shards) == 1 else shards
    for key in opened.replicated:
        parent, name = leaves.values[key] = _place(state, key)
        parent[name] = None  # set by the restore
    for key in opened.per_rank_keys:
        parent, name = _place(state, key)
        parent[name] = leaves.per_rank[key] = PerRank(None)
    return state, leaves


def _place(state: State, key: str) -> tuple[State, str]:
    """The dict that holds `key`, made as needed, and the name in it."""
    *levels, name = key.split("/")
    for level in levels:
        state = state.setdefault(level, {})
    return state, name
