"""Shards that ranks need and that lie on other nodes, sent to where they are needed: for another number of ranks, or
another decomposition. They are copied whole, each once a node, in bounded chunks, past nobody's memory, and removed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from mpi_ckpt.checkpoint import reshard
from mpi_ckpt.checkpoint.documents import read_document
from mpi_ckpt.checkpoint.local_tier import LocalTier
from mpi_ckpt.checkpoint.state import Leaves
from mpi_ckpt.checkpoint.tiers import Copies
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.combination import Combination, Part
from mpi_ckpt.redundancy.files import Files
from mpi_ckpt.redundancy.protect import carry_out, undone
from mpi_ckpt.redundancy.recovery import Place
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.direct import SLOW_DISK
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.shard_check import differs

logger = logging.getLogger(__name__)


class _Wish(NamedTuple):
    """A rank's place, and the shards that it needs there."""

    place: Place
    needed: frozenset[int]


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


class Guests:
    """Shards of other nodes on this one, for as long as a restore lasts: leaving the `with` ends their stay.

    A node's disk has room for one step more than it keeps, which the next save will need.
    """

    def __init__(self, council: Council, tier: LocalTier, manifest: ShardManifest) -> None:
        self._council, self._manifest = council, manifest
        self._place = Place(tier.domain, str(tier.root))
        self._paths = [tier.directory(manifest.step) / record.path for record in manifest.shards]
        self._written: list[Path] = []
        self._sent: set[tuple[Place, int]] = set()  # known to rank 0, which plans

    def __enter__(self) -> Guests:
        return self

    def __exit__(self, *_: object) -> None:
        """**Local.** A copy that cannot be removed is logged: the step takes it along when it goes."""
        try:
            atomic.remove(*self._written, missing_ok=True)
        except OSError as error:
            logger.warning("cannot remove a shard that was fetched for a restore, going on: %s", error)

    def fetch(self, ranks: set[int]) -> None:
        """**Collective.** Bring the shards of `ranks` of the save to this rank's node; each lies on its host's already.

        What lies here under such a name, left by a launch that died, is replaced. Raises CheckpointError; CorruptShard
        where a copy has another crc32c than its record.
        """
        wish = _Wish(self._place, frozenset(ranks))
        moves: list[_Move] = self._council.agree(lambda: wish, self._plan)
        if not moves:
            return
        mine = {move: self._paths[move.shard] for move in moves if move.writer == self._council.rank}
        with undone(*map(names.tmp, mine.values())):
            slow = sum(self._manifest.shards[move.shard].nbytes for move in moves) / SLOW_DISK
            self._council.agree(lambda: self._receive(moves, mine), lambda _: None, extra_time=slow)

        def publish() -> None:
            for path in mine.values():
                self._written.append(path)  # no sooner: an intact copy of before may lie there
                atomic.publish(names.tmp(path), path)

        self._council.everywhere(publish)

    def _plan(self, wishes: list[_Wish]) -> list[_Move]:
        """Rank 0: which shards go where; a node's lowest rank that wants one writes it."""
        moves = []
        for rank, wish in enumerate(wishes):
            for shard in sorted(wish.needed):
                host = shard % len(wishes)
                if wishes[host].place != wish.place and (wish.place, shard) not in self._sent:
                    self._sent.add((wish.place, shard))
                    moves.append(_Move(shard, host, rank))
        return moves

    def _receive(self, moves: list[_Move], mine: dict[_Move, Path]) -> None:
        """Take part in the exchange; this rank's copies are durable and compared under their temporary names then."""
        records = self._manifest.shards
        temporary = {move: names.tmp(path) for move, path in mine.items()}
        with Files({move: self._paths[move.shard] for move in moves}, temporary) as files:
            carry_out(self._council, [_copy(move, records[move.shard].nbytes) for move in moves], files)
            arrived = files.finish({move: records[move.shard].nbytes for move in mine})
        for move, path in mine.items():
            found, expected = [piece.crc32c for piece in arrived[move]], records[move.shard].crc32c
            if found != [expected]:
                raise differs(path, found=f"crc32c {', '.join(found)}", expected=f"crc32c {expected}")


def _copy(move: _Move, nbytes: int) -> Combination:
    here, there = (Part(rank, move, 0, nbytes) for rank in (move.reader, move.writer))
    return Combination((here,), (there,), ((1,),))
