"""Shards that ranks need and that lie on other nodes, sent to where they are needed: for another number of ranks, or
another decomposition. They are copied whole, each once a node, in bounded chunks, past nobody's memory."""

from __future__ import annotations

from typing import NamedTuple

from mpi_ckpt.checkpoint import reshard
from mpi_ckpt.checkpoint.documents import read_document
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.checkpoint.state import Leaves
from mpi_ckpt.checkpoint.tiers import Copies
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.exchange import Combination, Part
from mpi_ckpt.redundancy.files import Files
from mpi_ckpt.redundancy.protect import SLOW_DISK, duplicate, undone
from mpi_ckpt.redundancy.recovery import Place
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import ShardManifest


class _Wish(NamedTuple):
    """A rank's place, the shards that it needs there, and those that are there."""

    place: Place
    needed: frozenset[int]
    held: frozenset[int]


class _Move(NamedTuple):
    """Rank `reader` sends the shard of rank `shard` of the save to rank `writer`, which writes it on its node."""

    shard: int
    reader: int
    writer: int


def for_values(council: Council, copies: Copies) -> set[int]:
    """**Collective.** The shards whose values rank 0 has to read: all, where other ranks have saved values per rank."""
    per_rank = council.share(lambda: bool(copies.nearest(lambda d: read_document(d, copies.manifest, 0))["per_rank"]))
    return {*range(copies.manifest.world_size)} if per_rank and council.rank == 0 else set()


def for_arrays(manifest: ShardManifest, leaves: Leaves, keys: tuple[str, ...] | None) -> set[int]:
    """**Local.** The shards that this rank's blocks lie in; none for a state that does not fit: `restore` says so."""
    chosen = leaves.select(keys)
    shapes = {key: shards[0].shape for key, shards in chosen.shards.items()}
    shapes |= {key: array.shape for key, array in chosen.arrays.items()}
    fits = all(key in manifest.arrays and manifest.arrays[key].shape == shape for key, shape in shapes.items())
    return {*reshard.plan_reads(manifest, chosen)} if fits else set()


def fetch(council: Council, tier: LocalTier, manifest: ShardManifest, ranks: set[int]) -> None:
    """**Collective.** Bring the shards of `ranks` of the save to this rank's node. Each lies on its host's already.

    They stay in the step's directory, until the step goes. Raises CheckpointError, CorruptShard.
    """
    directory = tier.directory(manifest.step)
    paths = [directory / record.path for record in manifest.shards]

    def look() -> _Wish:
        held = frozenset(r for r, path in enumerate(paths) if path.exists()) if tier.leads else frozenset()
        return _Wish(Place(tier.domain, str(tier.root)), frozenset(ranks), held)

    moves = council.agree(look, _plan)
    if not moves:
        return
    mine = {move: paths[move.shard] for move in moves if move.writer == council.rank}
    sizes = {move: manifest.shards[move.shard].nbytes for move in moves}

    def work() -> None:
        temporary = {move: names.tmp(path) for move, path in mine.items()}
        with Files({move: paths[move.shard] for move in moves}, temporary) as files:
            run([_copy(move, sizes[move]) for move in moves], files)
            files.finish({move: sizes[move] for move in mine})

    with undone(*map(names.tmp, mine.values())), duplicate(council) as run:
        council.agree(work, lambda _: None, extra_time=sum(sizes.values()) / SLOW_DISK)

    def publish() -> None:
        for path in mine.values():
            atomic.publish(names.tmp(path), path)

    council.everywhere(publish)


def _plan(wishes: list[_Wish]) -> list[_Move]:
    """Rank 0: which shards go where; a node's lowest rank that wants one writes it."""
    held = {(wish.place, shard) for wish in wishes for shard in wish.held}
    moves = []
    for rank, wish in enumerate(wishes):
        for shard in sorted(wish.needed):
            if (wish.place, shard) not in held:
                held.add((wish.place, shard))
                moves.append(_Move(shard, shard % len(wishes), rank))
    return moves


def _copy(move: _Move, nbytes: int) -> Combination:
    here, there = (Part(rank, move, 0, nbytes) for rank in (move.reader, move.writer))
    return Combination((here,), (there,), ((1,),))
