"""Saves steps to two tiers, or restores from them, as asked by a JSON document; prints what happened as another.

{"root": ..., "remote": ..., "save": [10, 20], "seed": 0, "elements": 100000, "pause": 0.0, "options": {...},
 "restore": true, "overwrite": false, "discard_after": null, "metrics": {"10": {"loss": 1.0}}}

Each event says when it was: "at", of the clock that all processes of a machine share.
"""

from __future__ import annotations

import time

import numpy as np

from mpi_ckpt import Checkpointer, PerRank, Shard, shard_range
from tests.programs import told


def state(comm, elements: int, step: int) -> dict:
    """This rank's part at a step; filled with NaN for a step of -1."""
    start, stop = shard_range(elements, comm.size, comm.rank)
    array = np.full(stop - start, np.nan) if step < 0 else np.arange(start, stop) + step / 1000
    return {
        "x": Shard(array, start=start, shape=elements),
        "step": step,
        "rank": PerRank(comm.rank, resize=lambda old, rank, size: rank),
    }


def run(comm, task: dict, events: list) -> dict:
    elements, found = task.get("elements", 100_000), None
    steps: list[int] = []
    options = {"keep": 2} | task.get("options", {})

    def note(event: dict) -> None:
        events.append(event | {"at": time.monotonic()})

    with Checkpointer(task["root"], comm, remote=task["remote"], on_event=note, **options) as checkpointer:
        if task.get("restore"):
            target = state(comm, elements, -1)
            restored = checkpointer.restore(target, world_size="any")
            found = restored and restored.step
            expected = state(comm, elements, -1 if found is None else found + task.get("seed", 0))
            assert np.array_equal(target["x"].array, expected["x"].array, equal_nan=True), "other bits"
        if task.get("discard_after") is not None:
            checkpointer.discard_after(task["discard_after"])
        for step in task.get("save", []):
            content = state(comm, elements, step + task.get("seed", 0))
            metrics = task.get("metrics", {}).get(str(step))
            checkpointer.save(step, content, metrics=metrics, overwrite=task.get("overwrite", False))
            time.sleep(task.get("pause", 0.0))
        steps = checkpointer.all_steps()
    return {"restored": found, "steps": steps}


if __name__ == "__main__":
    told.main(run)
