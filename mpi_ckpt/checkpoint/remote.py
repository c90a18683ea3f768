"""What the second tier keeps, misses and holds too much: decisions over a listing, each done by a thin function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpi_ckpt.checkpoint import retention, steps
from mpi_ckpt.comm.threads import threads_may_communicate
from mpi_ckpt.errors import InvalidManifest, NoCheckpoint, RemoteFailed, RemoteRefused
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.object_store import ObjectStore, open_store
from mpi_ckpt.storage.remote_steps import is_uploaded, list_remote, read_upload_manifest, retire

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteOptions:
    """Where uploads go, and how. See `Checkpointer`."""

    url: str
    local: retention.Policy  # as many steps may wait as it keeps
    keep: int | None = None  # remote steps
    bandwidth: float | None = None  # bytes a second and rank
    nice: int = 0
    before_upload: Callable[[ObjectStore], None] | None = None  # on rank 0

    def __post_init__(self) -> None:
        if self.keep is not None and (type(self.keep) is not int or self.keep < 1):
            raise ValueError(f"remote_keep: found {self.keep!r}, expected an int of 1 or more, or None")
        if self.bandwidth is not None and not self.bandwidth > 0:
            raise ValueError(f"remote_bandwidth: found {self.bandwidth!r}, expected bytes a second, or None")

    @property
    def policy(self) -> retention.Policy:
        """What stays in the remote tier: as many as were asked for, and what never rotates here either."""
        return replace(self.local, keep=self.keep)


def check_threads(url: str) -> None:
    """**Local.** Raise RemoteRefused where this process can never upload: for want of threads, or of the client."""
    if not threads_may_communicate():
        raise RemoteRefused(
            "uploads need an MPI library that lets threads communicate",
            found="less than MPI_THREAD_MULTIPLE",
            expected="MPI_THREAD_MULTIPLE",
            action="Leave `remote` out and upload with `python -m mpi_ckpt push`, or use an MPI that grants it.",
        )
    open_store(url)


def check(url: str) -> None:
    """**Local.** Raise RemoteRefused where address, package, credentials or bucket are wrong, or nothing can be put.

    A store that does not answer is logged: it may be back before it is needed.
    """
    try:
        open_store(url).check(writing=True)
    except RemoteRefused:
        raise
    except RemoteFailed as error:
        logger.warning("the remote tier does not answer now: %s", error)


def local_manifest(root: Path, step: int) -> ShardManifest | None:
    """**Local.** The manifest of a step below `root`; None where there is none, or none that can be read."""
    try:
        return read_manifest(names.step_dir(root, step))
    except (NoCheckpoint, InvalidManifest):
        return None


@dataclass
class Seen:
    """What is remembered of the store from one step to the next."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # of committed steps
    leftovers: set[int] = field(default_factory=set)  # steps of which shards may lie there that nobody will commit


def look(store: ObjectStore, root: Path, policy: retention.Policy, seen: Seen) -> list[int]:
    """**Local.** The local steps that an earlier launch did not get to upload; `seen` learns of leftovers of others.

    Those are the steps that the store has not and that `policy` would keep there, and those that were saved again
    since. Nothing is deleted: what looks left over may be on its way. Raises RemoteFailed.
    """
    listed, here = list_remote(store), names.list_steps(root)
    there = {step for step, found in listed.items() if found.committed}
    metrics = _metrics_of(store, there, policy, seen) | _local_metrics(root, here)
    doomed = _choose({*here, *there}, root, policy, metrics)
    missing = []
    for step in here:
        try:
            if step not in there:
                if step not in doomed:
                    missing.append(step)
            elif not is_uploaded(store, read_manifest(names.step_dir(root, step))):
                missing.append(step)
        except (NoCheckpoint, InvalidManifest) as error:  # pruned at this moment, or not for others to have
            logger.warning("step %d is not uploaded: %s", step, error)
    seen.leftovers |= {step for step, found in listed.items() if not found.committed} - {*here}
    return missing


def tidy(
    store: ObjectStore,
    root: Path,
    manifest: ShardManifest,
    policy: retention.Policy,
    seen: Seen,
    check_ours: Callable[[], None],
) -> None:
    """**Local.** After a step's upload manifest is there: delete what it has replaced, what the policy lets go, and
    leftovers. Steps that are pinned below `root` stay. `check_ours` raises where the store is not this launch's any
    more. Raises RemoteFailed.
    """
    listed = list_remote(store)
    committed = [step for step, found in listed.items() if found.committed]
    seen.metrics[manifest.step] = dict(manifest.metrics)
    doomed = _choose(committed, root, policy, _metrics_of(store, committed, policy, seen))
    check_ours()  # a successor's steps may be among those listed
    if manifest.step in listed:
        mine = f"{names.step_name(manifest.step)}/{manifest.save_id}/"
        store.delete([key for key in listed[manifest.step].shards if not key.startswith(mine)])
    for step in doomed:
        seen.leftovers.add(step)  # should only its manifest go
        retire(store, step, listed[step])
        seen.metrics.pop(step, None)
    for step in sorted(seen.leftovers & listed.keys() - {*committed}):
        if not steps.is_committed(names.step_dir(root, step)):  # else `push` may be sending it
            retire(store, step, listed[step])
    if committed and committed[-1] > max(manifest.step, *names.list_steps(root)):  # else a late one, nothing more
        text = "step %d is uploaded while step %d is there, which a restart would take: see `discard_after`"
        logger.warning(text, manifest.step, committed[-1])


def _choose(
    found: Iterable[int], root: Path, policy: retention.Policy, metrics: dict[int, dict[str, float]]
) -> list[int]:
    """Which of the steps found `policy` lets go from the remote tier."""
    ordered = sorted(found)
    pinned = frozenset(step for step in ordered if steps.is_pinned(names.step_dir(root, step)))
    return retention.choose(ordered, policy, held=pinned, metrics=metrics)


def _local_metrics(root: Path, here: Iterable[int]) -> dict[int, dict[str, float]]:
    found = {step: local_manifest(root, step) for step in here}
    return {step: dict(manifest.metrics) for step, manifest in found.items() if manifest is not None}


def _metrics_of(
    store: ObjectStore, committed: Iterable[int], policy: retention.Policy, seen: Seen
) -> dict[int, dict[str, float]]:
    """What `seen` knows, of all committed steps where `policy` asks for them."""
    if policy.best_metric is not None:
        seen.metrics |= {step: _read_metrics(store, step) for step in committed if step not in seen.metrics}
    return seen.metrics


def _read_metrics(store: ObjectStore, step: int) -> dict[str, float]:
    try:
        found = read_upload_manifest(store, step)
    except InvalidManifest:  # a damaged step is not the best one, and no reason to keep all others
        return {}
    return dict(found.metrics) if found is not None else {}


def discard_after(store: ObjectStore, step: int, check_ours: Callable[[], None]) -> list[int]:
    """**Local.** Delete every step after `step` from the store, the highest first; the committed ones among them.

    `check_ours` raises where the store is not this launch's any more. Raises RemoteFailed.
    """
    later = {s: found for s, found in reversed(list_remote(store).items()) if s > step}
    for s, found in later.items():
        check_ours()  # a successor's steps may be among those listed
        retire(store, s, found)
    return [s for s, found in later.items() if found.committed]
