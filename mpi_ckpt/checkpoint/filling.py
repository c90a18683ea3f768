"""From an open step into the state of any number of ranks.

    check    every rank: keys, dtypes, shapes, sizes of the files it will read                then all agree
    read     every rank: the bytes it needs, verified on the way, straight into its arrays    then all agree
    set      plain values and generators, which cannot fail any more

No array is touched before every rank has agreed that the structure fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mpi_ckpt.checkpoint import reshard, values
from mpi_ckpt.checkpoint.documents import read_document
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions, Template
from mpi_ckpt.checkpoint.state import Leaves, PerRank
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import LayoutMismatch
from mpi_ckpt.storage.manifest import ShardRecord
from mpi_ckpt.storage.places import Directory
from mpi_ckpt.storage.shard_file import check_structure, read_blocks, read_shard


def fill(council: Council, opened: Opened, template: Template, options: RestoreOptions) -> None:
    """**Collective.** Check, read and set, in this order, each agreed on by all ranks."""
    rank = council.rank

    def check() -> tuple[Leaves, dict[int, list[reshard.Read]], dict[str, Any]]:
        leaves = template(opened).select(options.keys)
        return leaves, *_check(opened, leaves, rank, council.size, options)

    leaves, plan, found = council.everywhere(check)
    council.everywhere(lambda: _read(opened, plan, rank, council.size, options))
    _set_values(leaves, found)


def _check(
    opened: Opened, leaves: Leaves, rank: int, size: int, options: RestoreOptions
) -> tuple[dict[int, list[reshard.Read]], dict[str, Any]]:
    """Everything that can be known without reading an array: the reads of this rank, and its decoded values."""
    manifest, copies = opened.manifest, opened.copies
    old = opened.old_per_rank or []
    if opened.old_per_rank is None:
        own = copies.nearest(lambda directory: read_document(directory, manifest, rank)["per_rank"])
    else:
        own = old[rank] if len(old) == size else None  # None: the application has to say what becomes of the old ones
    saved = {key: "replicated array" if a.replicated else "sharded array" for key, a in manifest.arrays.items()}
    saved |= dict.fromkeys(opened.replicated, "plain value")
    saved |= dict.fromkeys(opened.per_rank_keys, "value per rank")
    reshard.check_keys(saved, leaves.kinds, options.keys is not None, copies.directory)
    reshard.check_fits(manifest, leaves, copies.directory)
    plan = reshard.plan_reads(manifest, leaves)
    for shard in {*plan, *range(rank, manifest.world_size, size)}:  # between them the ranks look at every file
        copies.nearest(partial(_look_at, manifest.shards[shard]))
    found = {key: values.decode(opened.replicated[key]) for key in leaves.values}
    for key, (parent, name) in leaves.values.items():
        if isinstance(parent[name], values.Generator):
            _check_generator(key, parent[name], found[key])
    for key, leaf in leaves.per_rank.items():
        if own is not None:
            found[key] = values.decode(own[key])
        else:
            found[key] = _resized(key, leaf, [values.decode(document[key]) for document in old], rank, size)
        if isinstance(leaf.value, values.Generator):
            _check_generator(key, leaf.value, found[key])
    return plan, found


def _resized(key: str, leaf: PerRank, old: list[Any], rank: int, size: int) -> Any:
    if leaf.resize is None:
        raise LayoutMismatch(
            f"{key!r} holds a value per rank, and the number of ranks has changed",
            found=f"values of {len(old)} ranks",
            expected=f"values of {size} ranks",
            action="Say what the new ranks get: PerRank(value, resize=f), f(old_values, rank, size).",
        )
    value = leaf.resize(old, rank, size)
    return values.SavedGenerator.of(value) if isinstance(value, values.Generator) else value


def _check_generator(key: str, generator: Any, saved: Any) -> None:
    if not isinstance(saved, values.SavedGenerator):
        raise LayoutMismatch(
            f"{key!r} is a random generator in the state but not in the checkpoint",
            found=type(saved).__name__,
            expected="the state of a generator",
            action="Restore into what was saved.",
        )
    saved.check_fits(key, generator)


def _look_at(record: ShardRecord, directory: Directory) -> None:
    check_structure(directory / record.path, record)


def _read(opened: Opened, plan: dict[int, list[reshard.Read]], rank: int, size: int, options: RestoreOptions) -> None:
    """Every rank: the planned pieces, and its own file whole where its sha256 can be checked in the same pass."""
    manifest, copies = opened.manifest, opened.copies
    if manifest.world_size == size and options.keys is None:
        own = manifest.shards[rank]
        whole = [(read.source, read.out) for read in plan.get(rank, []) if read.whole]
        copies.nearest(lambda directory: read_shard(directory / own.path, own, whole, options.verify))
        plan = plan | {rank: [read for read in plan.get(rank, []) if not read.whole]}
    level = "none" if options.verify == "none" else "crc32c"
    for shard, reads in plan.items():
        wanted = [(read.source, read.region, read.out) for read in reads]
        copies.nearest(partial(_read_pieces, manifest.shards[shard], wanted, level))


def _read_pieces(record: ShardRecord, wanted: Sequence[Any], level: str, directory: Directory) -> None:
    read_blocks(directory / record.path, wanted, level)


def _set_values(leaves: Leaves, found: dict[str, Any]) -> None:
    for key, (parent, name) in leaves.values.items():
        if isinstance(parent[name], values.Generator):
            found[key].put_into(parent[name])
        else:
            parent[name] = found[key].build() if isinstance(found[key], values.SavedGenerator) else found[key]
    for key, leaf in leaves.per_rank.items():
        if isinstance(leaf.value, values.Generator):
            found[key].put_into(leaf.value)
        else:
            leaf.value = found[key].build() if isinstance(found[key], values.SavedGenerator) else found[key]
