"""A step made whole on the nodes: each rank's own file on its own node, with redundancy as strong as the nodes allow.

What lies on another node is sent from there, what is lost is made again by its group's scheme. Shards that even that
cannot give back are brought from the shared or the remote tier first, where the same save is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.checkpoint.tiers import Copies, tier_of
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, CorruptShard, RankSilent
from mpi_ckpt.redundancy.descriptor import descriptor_name, read_descriptor
from mpi_ckpt.redundancy.groups import Unprotected, form_groups
from mpi_ckpt.redundancy.protect import undone
from mpi_ckpt.redundancy.rebuild import protect_anew, rebuild
from mpi_ckpt.redundancy.recovery import Place, Report, host_domains
from mpi_ckpt.redundancy.survey import Found, survey
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.direct import SLOW_DISK
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.places import Directory
from mpi_ckpt.storage.shard_stream import fetch_shard

logger = logging.getLogger(__name__)


def make_whole(
    council: Council, tier: LocalTier, manifest: ShardManifest, verify: bool, on_event: Callable[[Event], None]
) -> None:
    """**Collective.** Bring every rank's own files to its own node, with their redundancy.

    With `verify` every file that lies on a node is read first, and a damaged one made again. Groups that survive fewer
    losses than those that could be formed now give way to new ones. Raises LostBeyondScheme, CorruptShard.
    """
    directory, save_id, records = tier.directory(manifest.step), manifest.save_id, manifest.shards

    def look(verify: bool) -> Found:
        read = _share(council, Place(tier.domain, str(directory)), manifest.world_size) if verify else range(0)
        return council.everywhere(lambda: survey(directory, save_id, records, verify=read))

    report = rebuild(council, directory, look, tier.domain, save_id=save_id, records=records, verify=verify)
    if _could_be_stronger(council, tier, manifest):
        report = _stronger(council, tier, manifest, report)
    done = {name: list(getattr(report, name)) for name in ("moved", "rebuilt", "encoded", "weak")}
    if any(done.values()):
        on_event({"event": "rebuild", "step": manifest.step, **done})


def _share(council: Council, place: Place, world_size: int) -> range:
    """**Collective.** The ranks of the save whose files, if they lie at `place`, this rank reads for its node."""
    places = council.agree(lambda: place, list)
    peers = [rank for rank, found in enumerate(places) if found == place]
    return range(peers.index(council.rank), world_size, len(peers))


def _could_be_stronger(council: Council, tier: LocalTier, manifest: ShardManifest) -> bool:
    """**Collective.** Whether groups of the nodes that the files lie on now would survive more losses than those that
    there are."""
    directory, place = tier.directory(manifest.step), Place(tier.domain, str(tier.root))
    hosted = manifest.shards[council.rank :: council.size]

    def look() -> tuple[Place, list[int]]:
        return place, [read_descriptor(directory / descriptor_name(record.path)).tolerance for record in hosted]

    def compare(found: list[tuple[Place, list[int]]]) -> bool:
        try:
            domains = host_domains([place for place, _ in found], manifest.world_size)
            possible = form_groups(tier.wanted, domains).tolerance
        except Unprotected:
            return False
        return min(tolerance for _, mine in found for tolerance in mine) < possible

    return council.agree(look, compare)


def _stronger(council: Council, tier: LocalTier, manifest: ShardManifest, report: Report) -> Report:
    """**Collective.** New groups, for ranks that are in none, or share a failure domain with another of theirs.

    Raises CorruptShard for a file that is not what was saved: the old groups, which are left then, may give it back.
    """
    directory, save_id = tier.directory(manifest.step), manifest.save_id
    try:
        new = protect_anew(council, directory, tier.domain, tier.wanted, save_id=save_id, records=manifest.shards)
    except (CorruptShard, RankSilent):
        raise
    except CheckpointError as error:
        if council.rank == 0:
            logger.warning("step %d is whole, but weaker than %s: %s", manifest.step, tier.wanted, error)
        return report
    return replace(report, encoded=new.encoded, weak=new.weak, bare=())


def bring(
    council: Council, tier: LocalTier, manifest: ShardManifest, far: Copies, ranks: Sequence[int]
) -> dict[str, list[str]]:
    """**Collective.** Copy the shards of `ranks` of the save from the places `far` of the same save to the nodes that
    they belong to; their names, by the tier that each came from.

    A damaged one is replaced; each is compared with its sha256 before it gets its name. Raises MissingShard,
    CorruptShard, RemoteFailed; CheckpointError where a node's disk fails. No new file is left then.
    """
    directory = tier.directory(manifest.step)
    mine = [rank for rank in ranks if rank % council.size == council.rank]
    paths = {rank: directory / manifest.shards[rank].path for rank in mine}

    def fetch(rank: int) -> tuple[str, str]:
        record, there = manifest.shards[rank], far.manifest.shards[rank].path

        def copy(place: Directory) -> str:
            fetch_shard(place / there, record, names.tmp(paths[rank]))
            return tier_of(place)

        return far.nearest(copy), record.path

    def fetch_all() -> list[tuple[str, str]]:
        if mine:
            atomic.make_dir(directory)
        return [fetch(rank) for rank in mine]

    def by_tier(found: list[list[tuple[str, str]]]) -> dict[str, list[str]]:
        brought: dict[str, list[str]] = {}
        for origin, name in sorted(pair for pairs in found for pair in pairs):
            brought.setdefault(origin, []).append(name)
        return brought

    def publish() -> None:
        for path in paths.values():
            atomic.publish(names.tmp(path), path)

    with undone(*map(names.tmp, paths.values())):
        slow = sum(manifest.shards[rank].nbytes for rank in ranks) / SLOW_DISK
        brought = council.agree(fetch_all, by_tier, extra_time=slow)
        council.everywhere(publish)
    return brought
