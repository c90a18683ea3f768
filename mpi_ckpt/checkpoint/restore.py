"""From a committed step back into the state of any number of ranks.

    open     rank 0 chooses the step and reads its manifest                                   then all agree
    check    every rank: keys, dtypes, shapes, sizes of the files it will read                then all agree
    read     every rank: the bytes it needs, verified on the way, straight into its arrays    then all agree
    set      plain values and generators, which cannot fail any more

No array is touched before every rank has agreed that the structure fits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import environment, reshard, steps, values
from mpi_ckpt.checkpoint.documents import Document, read_document, read_per_rank
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.state import Leaves, PerRank
from mpi_ckpt.checkpoint.tiers import Copies, Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import (
    CheckpointError,
    CorruptShard,
    InvalidManifest,
    LayoutMismatch,
    MissingShard,
    NoCheckpoint,
    UnknownSchema,
    WorldSizeMismatch,
)
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, ShardRecord
from mpi_ckpt.storage.places import Directory
from mpi_ckpt.storage.shard_file import check_structure, read_blocks, read_shard

logger = logging.getLogger(__name__)

_ATTEMPTS = 100  # steps that may be damaged, or pruned while they are read, before a restore gives up


@dataclass(frozen=True)
class Options:
    """How to restore. `step` None is the newest. `keys` None is everything. See `Checkpointer.restore`."""

    step: int | None = None
    keys: tuple[str, ...] | None = None
    world_size: str = "same"
    verify: str = "full"
    on_damage: str = "raise"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("world_size", ("same", "any")),
            ("verify", ("full", "quick", "none")),
            ("on_damage", ("raise", "older")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: found {value!r}, expected one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class Opened:
    """A step that rank 0 has opened: where its shards lie, its manifest, and the values that every rank needs."""

    copies: Copies
    replicated: Document
    per_rank_keys: tuple[str, ...]
    old_per_rank: list[Document] | None  # of the ranks that saved them, unless each rank's own lie in its shard

    @property
    def manifest(self) -> ShardManifest:
        return self.copies.manifest


Template = Callable[[Opened], Leaves]


def restore(
    council: Council,
    tiers: Tiers,
    template: Template,
    options: Options,
    *,
    set_aside: bool,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Opened | None:
    """**Collective.** Fill the leaves that `template` gives for the opened step; None when there is no step at all.

    With `on_damage="older"` and no step named, a damaged step is logged and the next older one taken; with `set_aside`
    its manifest is renamed, so that nothing counts it as a checkpoint again. A step that a writer beside this reader
    prunes or replaces meanwhile is no damage: the newest is chosen again. Raises NoCheckpoint, WorldSizeMismatch,
    LayoutMismatch, MissingShard, CorruptShard, InvalidManifest or RemoteFailed, the same on every rank.
    """
    below: int | None = None
    for _ in range(_ATTEMPTS):
        step = council.share(partial(_choose, tiers, options.step, below))
        if step is None:
            return None
        directory = names.step_dir(tiers.root, step)
        opened: Opened | None = None
        try:
            opened = council.share(partial(_open, tiers, step, council.size, options))
            fill(council, opened, template, options)
            return opened
        except UnknownSchema:
            raise
        except (MissingShard, CorruptShard, InvalidManifest, NoCheckpoint) as error:
            if council.share(partial(tiers.has_changed, step, opened.manifest if opened else None)):
                if options.step is not None:
                    raise _pruned(directory) from error
                continue
            if options.on_damage == "raise" or options.step is not None:
                raise
            below = step
            council.share(partial(_give_up, directory, error, set_aside))
            on_event({"event": "damage", "step": step, "error": str(error)})
    raise _pruned(tiers.root)


def _pruned(path: Path) -> NoCheckpoint:
    return NoCheckpoint(
        "the step was pruned while it was being read",
        path=path,
        found="a writer that deletes or replaces steps faster than they can be read",
        expected="a step that stays",
        action="Restore the newest step, or pin this one (`python -m mpi_ckpt pin`).",
    )


def _choose(tiers: Tiers, step: int | None, below: int | None) -> int | None:
    """Rank 0: the step to open. None if there has never been one; NoCheckpoint if there is none left."""
    root, committed = tiers.root, tiers.list_steps()
    if step is not None and below is None:
        if step not in committed:
            raise NoCheckpoint(
                f"step {step} is not committed",
                path=root,
                found=f"steps {', '.join(map(str, committed)) or 'none'}",
                expected=f"step {step}",
                action="Name one of the committed steps, or none for the newest.",
            )
        return step
    if below is not None:
        committed = [s for s in committed if s < below]
    if committed:
        return committed[-1]
    damaged = steps.list_set_aside(root)
    if damaged or below is not None:
        raise NoCheckpoint(
            "no intact step is left",
            path=root,
            found=f"damaged steps {', '.join(map(str, damaged)) or below}",
            expected="a step whose every shard is whole",
            action="Look at them with `verify`; start fresh only in another directory, on purpose.",
        )
    return None


def _give_up(directory: Path, error: CheckpointError, set_aside: bool) -> None:
    logger.warning("%s is damaged, going on with an older step: %s", directory.name, error)
    if set_aside and steps.is_committed(directory):
        steps.set_aside(directory)


def fill(council: Council, opened: Opened, template: Template, options: Options) -> None:
    """**Collective.** Check, read and set, in this order, each agreed on by all ranks."""
    rank = council.rank

    def check() -> tuple[Leaves, dict[int, list[reshard.Read]], dict[str, Any]]:
        leaves = template(opened).select(options.keys)
        return leaves, *_check(opened, leaves, rank, council.size, options)

    leaves, plan, found = council.everywhere(check)
    council.everywhere(lambda: _read(opened, plan, rank, council.size, options))
    _set_values(leaves, found)


def _open(tiers: Tiers, step: int, size: int, options: Options) -> Opened:
    return open_copies(tiers.open(step), size, options)


def open_copies(copies: Copies, size: int, options: Options) -> Opened:
    """**Local.** The values that all of `size` ranks need of a step. Raises WorldSizeMismatch, MissingShard,
    CorruptShard."""
    check_world_size(copies, size, options)
    manifest = copies.manifest
    document = copies.nearest(lambda directory: read_document(directory, manifest, 0))
    own_still = manifest.world_size == size and "old_per_rank" not in document
    old = None if own_still else copies.nearest(lambda directory: read_per_rank(directory, manifest, document))
    return Opened(copies, document["replicated"], tuple(old[0] if old else document["per_rank"]), old)


def check_world_size(copies: Copies, size: int, options: Options) -> None:
    """**Local.** Raise WorldSizeMismatch where another number of ranks saved the step and that was not asked for."""
    manifest = copies.manifest
    if manifest.world_size != size and options.world_size == "same":
        raise WorldSizeMismatch(
            f"step {manifest.step} was saved by another number of ranks",
            path=copies.manifest_path,
            found=f"{manifest.world_size} ranks in the checkpoint",
            expected=f"{size} ranks, as many as are running",
            action="Run on as many ranks, or ask for resharding: world_size='any' (--elastic).",
        )


def _check(
    opened: Opened, leaves: Leaves, rank: int, size: int, options: Options
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


def _read(opened: Opened, plan: dict[int, list[reshard.Read]], rank: int, size: int, options: Options) -> None:
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


def warn_of_differences(manifest: ShardManifest) -> None:
    """**Local.** Log what may make a continued run differ in the last bits from one that was never interrupted."""
    for line in environment.differences(manifest.environment):
        logger.warning("step %d was saved in another environment (%s): expect other last bits", manifest.step, line)
