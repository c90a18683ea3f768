"""Saves to the node-local tier, or restores from it, as asked by a JSON document; prints what happened as another.

{"root": ..., "local": ".../{domain}", "domains": ["a", "a", "b"], "redundancy": "xor", "save": [10, 20], "seed": 0,
 "elements": 100000, "restore": true, "step": null, "overwrite": false, "discard_after": null, "options": {...},
 "values": true, "kill": [rank, n]}

"kill": that rank kills itself (SIGKILL) in the place of its n-th rename of a manifest; n < 0: right after it. With a
third item, "unlink": at its n-th removal of one, and the other ranks have half a second to go on without it.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from mpi_ckpt import Checkpointer, PerRank, Shard, shard_range
from tests.cluster import leave_on_nodes
from tests.programs import told


def state(comm, task: dict, step: int) -> dict:
    """This rank's part at a step; filled with NaN for a step of -1."""
    elements, seed = task.get("elements", 100_000), task.get("seed", 0)
    start, stop = shard_range(elements, comm.size, comm.rank)
    array = np.full(stop - start, np.nan) if step < 0 else np.arange(start, stop) * 1.5 + step + seed / 1000
    own = {"rank": PerRank(comm.rank, resize=lambda old, rank, size: rank)} if task.get("values", True) else {}
    return {"x": Shard(array, start=start, shape=elements), "step": step, **own}


def kill_at(number: int, call: str = "rename") -> None:
    """End this process at a rename, or another call, of a manifest, before it (n) or after it (-n)."""
    real, count = getattr(os, call), 0

    def counting(*paths) -> None:
        nonlocal count
        about = str(paths[-1]).endswith("manifest.json")
        count += about
        if about and count == number:
            die()
        real(*paths)
        if about and count == -number:
            die()

    def die() -> None:
        time.sleep(0.5 if call == "unlink" else 0.0)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, call, counting)


def run(comm, task: dict, events: list) -> dict:
    found = None
    options = {"redundancy": task.get("redundancy", "xor"), "timeout": 20.0} | task.get("options", {})
    domain = task["domains"][comm.rank]
    if task.get("kill", [None])[0] == comm.rank:
        kill_at(*task["kill"][1:])
    with Checkpointer(
        task["root"], comm, local=task["local"], domain=domain, on_event=events.append, **options
    ) as checkpointer:
        leave_on_nodes(checkpointer)
        if task.get("restore"):
            target = state(comm, task, -1)
            restored = checkpointer.restore(target, task.get("step"), world_size=task.get("world_size", "any"))
            found = restored and restored.step
            expected = state(comm, task, -1 if found is None else found)
            assert np.array_equal(target["x"].array, expected["x"].array, equal_nan=True), "other bits"
            assert target["step"] == expected["step"]
        if task.get("discard_after") is not None:
            checkpointer.discard_after(task["discard_after"])
        for step in task.get("save", []):
            checkpointer.save(step, state(comm, task, step), overwrite=task.get("overwrite", False))
        checkpointer.wait_until_finished()
        steps = checkpointer.all_steps()
    return {"restored": found, "steps": steps}


if __name__ == "__main__":
    told.main(run)
