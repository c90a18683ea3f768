"""What a launch has in hand while it trains: the parts that the loop and a rollback work with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpi_ckpt.checkpoint.checkpointer import Checkpointer, Found
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.run_file import RUN_FILE, differing, identity
from mpi_ckpt.train.config import ConfigError, Options
from mpi_ckpt.train.guard import Guard
from mpi_ckpt.train.metrics import MetricsLog
from mpi_ckpt.train.preemption import Attention
from mpi_ckpt.train.run import Plan
from mpi_ckpt.train.trainer import Trainer
from mpi_ckpt.train.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass
class Job:
    """One launch. All ranks have one; only rank 0's has a log."""

    comm: MPI.Comm
    council: Council
    plan: Plan
    options: Options
    build: Callable[[], Trainer]  # **Collective.** A trainer as it is before the first step
    trainer: Trainer
    checkpointer: Checkpointer
    attention: Attention
    watchdog: Watchdog
    log: MetricsLog | None
    guard: Guard = field(default_factory=Guard)
    happened: dict[str, dict[str, Any]] = field(default_factory=dict)  # the checkpointer's last event of each name
    losses: dict[int, float] = field(default_factory=dict)  # of the steps of this launch

    @property
    def progress(self) -> dict[str, Any]:
        """The trainer's, see `Trainer.build`: a part of its state."""
        progress: dict[str, Any] = self.trainer.state["progress"]
        return progress

    def restore(self, step: int | None = None) -> Found | None:
        """**Collective.** The newest committed step, or `step`, into the trainer; None if there is none.

        Raises WorldSizeMismatch for another number of ranks or another mesh, unless the launch is elastic.
        """
        options = self.options
        with self.watchdog.engine():
            found = self.checkpointer.restore(
                self.trainer.state, step, world_size="any" if options.elastic else "same", on_damage=options.on_damage
            )
        if found is not None:
            self._check_run(found)
            saved = _mesh_of(found.manifest)
            if not options.elastic:
                self.trainer.mesh.check_saved(saved)
            self.trainer.restored(saved)
        return found

    def _check_run(self, found: Found) -> None:
        """Whichever tier the step came from: it has to be of this run."""
        mine = identity({"settings": self.plan.settings.to_json(), "run_id": self.plan.run_id})
        if other := differing(identity(found.meta), mine):
            raise ConfigError(
                f"step {found.step} is another run's",
                path=self.plan.run_dir / RUN_FILE,
                found=other.found,
                expected=other.expected,
                action="Give each run a --run-dir, a --local and a --remote of its own.",
            )

    def about(self, metrics: dict[str, float]) -> dict[str, Any]:
        """What a checkpoint says beside the state: the options of `Checkpointer.save`."""
        meta = self._constant_meta | {"cursor": self.progress["cursor"], "guard": self.guard.to_json()}
        return {"meta": meta, "metrics": metrics, "index": self._index}

    @cached_property
    def _constant_meta(self) -> dict[str, Any]:
        mesh = self.trainer.mesh.shape
        return {"run_id": self.plan.run_id, "settings": self.plan.settings.to_json(), "mesh": mesh}

    @cached_property
    def _index(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {p.name: (p.start, p.shape) for p in self.plan.settings.model.parameters()}

    def event(self, name: str, step: int, **fields: Any) -> None:
        """**Local.** A line of the metrics, from rank 0."""
        if self.log:
            self.log.write({"event": name, "step": step, **fields})


def _mesh_of(manifest: ShardManifest) -> dict[str, int]:
    """The mesh whose ranks' shards these are: the meta's, unless a tool has written them for other ranks since."""
    saved: dict[str, int] = manifest.meta.get("mesh", {})
    if math.prod(saved.values()) == manifest.world_size and saved:
        return saved
    return {"data": manifest.world_size, "tensor": 1}
