"""The plain values of a committed step, still encoded: one JSON document a shard, in its dataset `/values`.

    {"per_rank": {key: encoded}}                                 of every rank
    {"per_rank": ..., "replicated": {key: encoded}}              of rank 0
    {"per_rank": {}, "replicated": ..., "old_per_rank": [...]}   of rank 0, in a step that was resharded by a verb

Only the application knows what another number of ranks makes of values per rank. A step that was resharded without it
carries, as `old_per_rank`, those of the ranks that saved them, in their order, until a restore can ask it.
"""

from __future__ import annotations

from typing import Any

from mpi_ckpt.checkpoint import values
from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.places import Directory
from mpi_ckpt.storage.shard_file import check_structure, read_values

Document = dict[str, Any]


def read_document(directory: Directory, manifest: ShardManifest, rank: int) -> Document:
    """**Local.** The values in one rank's shard. Raises MissingShard, CorruptShard."""
    record = manifest.shards[rank]
    path = directory / record.path
    check_structure(path, record)
    try:
        document = values.loads(read_values(path, record))
        found: Document = {"per_rank": dict(document["per_rank"])}
        if rank == 0:
            found["replicated"] = dict(document["replicated"])
            if "old_per_rank" in document:
                found["old_per_rank"] = [dict(old) for old in document["old_per_rank"]]
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShard(
            "the plain values in a shard cannot be read",
            path=path,
            rank=rank,
            found=f"{type(error).__name__}: {error}",
            expected="the JSON that a save writes",
            action="Restore another step.",
        ) from error


def read_per_rank(directory: Directory, manifest: ShardManifest, first: Document) -> list[dict[str, Any]]:
    """**Local.** The values per rank, by the rank that saved them; `first` is rank 0's document, read already.

    Raises MissingShard, CorruptShard.
    """
    if "old_per_rank" in first:
        return first["old_per_rank"]
    if not first["per_rank"]:
        return [{} for _ in manifest.shards]
    others = range(1, manifest.world_size)
    return [first["per_rank"], *(read_document(directory, manifest, rank)["per_rank"] for rank in others)]
