"""Keeping a directory at the steps that its policy wants, before and after each save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import retention, steps
from mpi_ckpt.checkpoint.retention import Policy
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CorruptShard, InvalidManifest, MissingShard, UnknownSchema
from mpi_ckpt.storage import lock, names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.shard_file import verify_file

logger = logging.getLogger(__name__)


class Rotation:
    """The steps below `root` under a retention policy; `held`, set by its user, stays until a newer step is committed.

    `waiting` gives, on rank 0, steps that have to stay for now although they count as any other. The two methods run in
    the thread that commits, so deleting delays nobody.
    """

    def __init__(
        self,
        root: Path,
        policy: Policy,
        on_event: Callable[[dict[str, Any]], None],
        waiting: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self.held: int | None = None
        self._root = root
        self._policy = policy
        self._on_event = on_event
        self._waiting = waiting
        self._metrics: dict[int, dict[str, float]] = {}  # rank 0: read once a step
        self._verified: set[int] = set()

    def make_room(self, council: Council, launch_id: str, step: int) -> None:
        """**Collective.** Delete what saving `step` will push out, so that the disk never holds more than `keep`.

        Only after every step that will survive was read once and its crc32c found right; a damaged one is set aside and
        counts no more. With `keep=1` nothing goes before the save, and a step that is saved again never does. Raises
        DirectoryInUse where `launch_id` is not the one that holds the writer's lock any more: these steps are another's
        to delete.
        """
        intact = False
        while not intact and not self._policy.keeps_all:
            doomed, survivors = council.share(lambda: self._plan(launch_id, saving=step))
            unseen = [s for s in survivors if s not in self._verified] if doomed else []
            intact = all(self._verify(council, survivor) for survivor in unseen)  # a damaged one: plan anew
            if intact:
                self._prune(council, doomed)

    def after_commit(self, council: Council, launch_id: str, step: int) -> None:
        """**Collective.** Delete what the committed `step` has pushed out."""
        if self.held is not None and step > self.held:
            self.held = None
        self._forget(step)  # what another save of the same step held
        if self._policy.keeps_all:
            return
        doomed, _ = council.share(lambda: self._plan(launch_id))
        # What was just saved stays, even if later steps, of another attempt, are there.
        self._prune(council, [found for found in doomed if found != step])

    def _plan(self, launch_id: str, saving: int | None = None) -> tuple[list[int], list[int]]:
        """Rank 0: the doomed steps, and the rotating ones that will survive them."""
        lock.check_owner(self._root, launch_id)
        committed = names.list_steps(self._root)
        held = {s for s in committed if s in (self.held, saving) or steps.is_pinned(names.step_dir(self._root, s))}
        if self._policy.best_metric is not None:
            for step in committed:
                if step not in self._metrics:
                    self._metrics[step] = self._read_metrics(step)
        doomed = retention.choose(
            committed, self._policy, held=frozenset(held), metrics=self._metrics, incoming=int(saving is not None)
        )
        waiting = self._waiting()
        doomed = [step for step in doomed if step not in waiting]
        newest = [step for step in committed if step not in doomed][-(self._policy.keep or 0) :]
        return doomed, newest

    def _read_metrics(self, step: int) -> dict[str, float]:
        try:
            return dict(read_manifest(names.step_dir(self._root, step)).metrics)
        except InvalidManifest:  # a damaged step is not the best one, and no reason to stop saving
            return {}

    def _verify(self, council: Council, step: int) -> bool:
        """**Collective.** Whether the step is intact, every rank reading its part of the files."""
        directory = names.step_dir(self._root, step)

        def read_my_part() -> None:
            manifest = read_manifest(directory)
            for rank in range(council.rank, manifest.world_size, council.size):
                verify_file(directory / manifest.shards[rank].path, manifest.shards[rank], "quick")

        try:
            council.everywhere(read_my_part)
        except UnknownSchema:
            raise
        except (CorruptShard, MissingShard, InvalidManifest) as error:
            logger.warning("%s is damaged and is set aside: %s", directory.name, error)
            council.share(lambda: steps.set_aside(directory))
            self._on_event({"event": "damage", "step": step, "error": str(error)})
            return False
        self._verified.add(step)
        return True

    def _prune(self, council: Council, doomed: list[int]) -> None:
        if doomed:
            for step in council.share(lambda: retention.prune(self._root, doomed)):
                self._forget(step)
                self._on_event({"event": "prune", "step": step})

    def _forget(self, step: int) -> None:
        self._metrics.pop(step, None)
        self._verified.discard(step)
