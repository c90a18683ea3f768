"""Launches one after the other in a node-local tier, for tests: directories for nodes, real ranks in one job."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from mpi_ckpt import Checkpointer, PerRank, Shard, shard_range

ELEMENTS = 50_000


def leave_on_nodes(checkpointer: Checkpointer) -> None:
    """**Local.** As where a launch dies before its end: what is on the nodes alone stays there alone."""
    if checkpointer._local is not None:
        checkpointer._local.newest_unshared = lambda *_: None


class Cluster:
    """A launch after the other on "nodes", directories below `path`: rank r runs in the failure domain of[r]."""

    def __init__(self, comm, path: Path, redundancy: str = "xor", **options) -> None:
        self.comm, self.path = comm, path
        self.options = {"redundancy": redundancy, "shared_every": 100, "async_io": False, "timeout": 20.0} | options
        self.events: list[dict] = []

    def open(self, of: str, comm=None, *, ends: bool = False, **options) -> Checkpointer:
        """**Collective.** A launch's checkpointer; one that `ends` well copies its last save to the shared tier."""
        comm = comm or self.comm
        domain = of.split()[comm.rank] if " " in of else of[comm.rank]
        options = {"local": f"{self.path}/nodes/{{domain}}", "domain": domain} | self.options | options
        checkpointer = Checkpointer(self.path / "shared", comm, on_event=self.events.append, **options)
        if not ends:
            leave_on_nodes(checkpointer)
        return checkpointer

    def state(self, step: int | None, comm=None) -> dict:
        """This rank's part at a step; NaN where it is to be restored."""
        comm = comm or self.comm
        start, stop = shard_range(ELEMENTS, comm.size, comm.rank)
        x = np.full(stop - start, np.nan) if step is None else np.arange(start, stop) * 1.5 + step
        own = PerRank(comm.rank * 10 if step else None)
        return {
            "x": Shard(x, start, ELEMENTS),
            "w": np.full(5, np.nan if step is None else float(step)),
            "step": step,
            "own": own,
        }

    def save(self, of: str, *steps: int, shared: bool = False, **options) -> None:
        with self.open(of, **options) as checkpointer:
            for step in steps:
                checkpointer.save(step, self.state(step), shared=shared)

    def restore(self, of: str, step: int | None = None, **options) -> int | None:
        """**Collective.** The step that was found; its contents are what was saved."""
        with self.open(of, **options) as checkpointer:
            state = self.state(None)
            found = checkpointer.restore(state, step)
        if found is None:
            return None
        expected = self.state(found.step)
        assert np.array_equal(state["x"].array, expected["x"].array), "other bits"
        assert np.array_equal(state["w"], expected["w"]), "other bits"
        assert state["own"].value == expected["own"].value
        return found.step

    def lose(self, *nodes: str) -> None:
        self.comm.barrier()
        for node in nodes if self.comm.rank == 0 else ():
            shutil.rmtree(self.node(node))
        self.comm.barrier()

    def node(self, name: str) -> Path:
        return self.path / "nodes" / name

    def named(self, event: str) -> list[dict]:
        return [found for found in self.events if found["event"] == event]
