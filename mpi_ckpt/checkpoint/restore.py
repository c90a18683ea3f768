"""Which step is restored: the newest, or the one asked for; and what comes of damage and of a writer beside the reader.

open     rank 0 chooses the step and reads its manifest    then all agree
fill     see `filling`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mpi_ckpt.checkpoint import environment, filling, steps
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.opened import Opened, RestoreOptions, Template, open_copies
from mpi_ckpt.checkpoint.tiers import Tiers
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import (
    CheckpointError,
    CorruptShard,
    InvalidManifest,
    MissingShard,
    NoCheckpoint,
    UnknownSchema,
)
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest

logger = logging.getLogger(__name__)

DAMAGE = (MissingShard, CorruptShard, InvalidManifest)
_ATTEMPTS = 100  # steps that may be damaged, or pruned while they are read, before a restore gives up


def restore(
    council: Council,
    tiers: Tiers,
    template: Template,
    options: RestoreOptions,
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
        try:
            opened = restore_step(council, tiers, template, options, step)
        except DAMAGE as error:
            give_up(council, tiers, options, step, error, set_aside=set_aside, on_event=on_event)
            below = step
        else:
            if opened is not None:
                return opened
    raise _pruned(tiers.root)


def restore_step(
    council: Council, tiers: Tiers, template: Template, options: RestoreOptions, step: int
) -> Opened | None:
    """**Collective.** Fill the leaves from this step; None when a writer has pruned or replaced it meanwhile.

    Raises what `restore` does.
    """
    opened: Opened | None = None
    try:
        opened = council.share(partial(_open, tiers, step, council.size, options))
        filling.fill(council, opened, template, options)
        return opened
    except UnknownSchema:
        raise
    except (*DAMAGE, NoCheckpoint) as error:
        if not council.share(partial(tiers.has_changed, step, opened.manifest if opened else None)):
            raise
        if options.step is not None:
            raise _pruned(names.step_dir(tiers.root, step)) from error
        return None


def give_up(
    council: Council,
    tiers: Tiers,
    options: RestoreOptions,
    step: int,
    error: CheckpointError,
    *,
    set_aside: bool,
    on_event: Callable[[Event], None],
) -> None:
    """**Collective.** From an `except` for DAMAGE: say that the step is damaged, and go on; or raise, if an older step
    was not asked for."""
    if options.on_damage == "raise" or options.step is not None or isinstance(error, UnknownSchema):
        raise error
    council.share(partial(_give_up, names.step_dir(tiers.root, step), error, set_aside))
    on_event({"event": "damage", "step": step, "error": str(error)})


def _pruned(path: Path) -> NoCheckpoint:
    return NoCheckpoint(
        "the step was pruned while it was being read",
        path=path,
        found="a writer that deletes or replaces steps faster than they can be read",
        expected="a step that stays",
        action="Restore the newest step, or pin this one (`python -m mpi_ckpt pin`).",
    )


def not_committed(root: Path, step: int, committed: Sequence[int]) -> NoCheckpoint:
    """The error for a step that was asked for and is not there."""
    return NoCheckpoint(
        f"step {step} is not committed",
        path=root,
        found=f"steps {', '.join(map(str, committed)) or 'none'}",
        expected=f"step {step}",
        action="Name one of the committed steps, or none for the newest.",
    )


def _choose(tiers: Tiers, step: int | None, below: int | None) -> int | None:
    """Rank 0: the step to open. None if there has never been one; NoCheckpoint if there is none left."""
    root, committed = tiers.root, tiers.list_steps()
    if step is not None and below is None:
        if step not in committed:
            raise not_committed(root, step, committed)
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


def _open(tiers: Tiers, step: int, size: int, options: RestoreOptions) -> Opened:
    return open_copies(tiers.open(step), size, options)


def warn_of_differences(manifest: ShardManifest) -> None:
    """**Local.** Log what may make a continued run differ in the last bits from one that was never interrupted."""
    for line in environment.differences(manifest.environment):
        logger.warning("step %d was saved in another environment (%s): expect other last bits", manifest.step, line)
