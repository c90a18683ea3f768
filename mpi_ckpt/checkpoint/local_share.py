"""A step that the nodes alone have, into the shared tier: at the end of a launch, after which nodes may be given back.

The commit protocol once more, with the files of the save and its manifest as they are on the nodes: every rank copies
the shards that its node looks after, each compared with its sha256, and rank 0 commits when all are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from mpi_ckpt.checkpoint import commit
from mpi_ckpt.checkpoint.commit import Request
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.checkpoint.local_whole import make_whole
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CorruptShard, MissingShard
from mpi_ckpt.storage import atomic, lock, names
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.shard_stream import fetch_shard


def newest_unshared(council: Council, tier: LocalTier, shared: Callable[[], list[int]]) -> ShardManifest | None:
    """**Collective.** The manifest of the newest step on the nodes; None where `shared()` has that one or a newer."""
    latest = tier.agree(council).latest
    newest_there = council.share(lambda: max(shared(), default=-1))
    step = max(latest, default=-1)
    return tier.read_manifest(council, step, latest[step][1]) if step > newest_there else None


def share(
    council: Council, tier: LocalTier, request: Request, manifest: ShardManifest, on_event: Callable[[Event], None]
) -> float:
    """**Collective.** Commit the step in the request's root too; the seconds that the slowest rank took to copy.

    Files that are damaged or elsewhere on the nodes are made whole there first. Raises what a save does, and
    CorruptShard or MissingShard for what is lost beyond the scheme.
    """
    try:
        return _copy(council, tier, request, manifest)
    except (CorruptShard, MissingShard):
        make_whole(council, tier, manifest, True, on_event)
    return _copy(council, tier, request, manifest)


def _copy(council: Council, tier: LocalTier, request: Request, manifest: ShardManifest) -> float:
    place = commit.prepare(council, request)
    suffix = manifest.save_id if place.replaces else None
    records = [record._replace(path=names.shard_name(record.rank, suffix)) for record in manifest.shards]
    hosted = range(council.rank, manifest.world_size, council.size)
    paths = {rank: request.directory / records[rank].path for rank in hosted}

    def copy() -> float:
        began = time.monotonic()
        for rank, path in paths.items():
            there = tier.directory(request.step) / manifest.shards[rank].path
            fetch_shard(there, records[rank], names.tmp(path))
            lock.check_owner(request.root, request.launch_id)  # as of any save's file
            atomic.publish(names.tmp(path), path)
        return time.monotonic() - began

    def decide(seconds: list[float]) -> float:
        commit.publish(request, replace(manifest, shards=tuple(records)))
        return max(seconds)

    files = [*map(names.tmp, paths.values()), *paths.values()]
    return commit.conclude(council, request, place, copy, decide, files, request.nbytes)
