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
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.shard_file import verify_file

logger = logging.getLogger(__name__)


class Rotation:
    """The steps below `root` under a retention policy; `held` is a step that must stay, set by its user.

    Its two methods run in the thread that commits, so deleting delays nobody.
    """

    def __init__(self, root: Path, policy: Policy, on_event: Callable[[dict[str, Any]], None]) -> None:
        self.held: int | None = None
        self._root = root
        self._policy = policy
        self._on_event = on_event
        self._metrics: dict[int, dict[str, float]] = {}  # rank 0: read once a step
        self._verified: set[int] = set()

    def make_room(self, council: Council) -> None:
        """**Collective.** Delete before a save what it will push out, so that the disk never holds more than `keep`.

        Only after every step that will survive was read once and its crc32c found right; a damaged one is set aside and
        counts no more. With `keep=1` nothing goes before the save.
        """
        doomed, survivors = council.share(lambda: self._plan(incoming=1))
        for step in survivors if doomed else ():
            if step not in self._verified and not self._verify(council, step):
                return self.make_room(council)
        self._prune(council, doomed)
        return None

    def after_commit(self, council: Council) -> None:
        """**Collective.** Delete what a committed save has pushed out."""
        doomed, _ = council.share(lambda: self._plan(incoming=0))
        self._prune(council, doomed)

    def _plan(self, incoming: int) -> tuple[list[int], list[int]]:
        """Rank 0: the doomed steps, and the rotating ones that will survive them."""
        committed = names.list_steps(self._root)
        held = {s for s in committed if s == self.held or steps.is_pinned(names.step_dir(self._root, s))}
        if self._policy.best_metric is not None:
            for step in committed:
                if step not in self._metrics:
                    self._metrics[step] = dict(read_manifest(names.step_dir(self._root, step)).metrics)
        doomed = retention.choose(
            committed, self._policy, held=frozenset(held), metrics=self._metrics, incoming=incoming
        )
        newest = [step for step in committed if step not in doomed][-(self._policy.keep or 0) :]
        return doomed, newest

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
                self._on_event({"event": "prune", "step": step})
