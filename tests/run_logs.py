"""Logs of runs, written by hand: what `report` and `watch` read, with every event that the program can write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
SETTINGS = {"model": {"n_layer": 2, "n_embd": 32}, "global_batch": 8, "lr": 0.003, "data": None}
NBYTES = 8_000_000


class Log:
    """A run's directory with a log; every line comes a second after the one before, or `after` seconds."""

    def __init__(self, run_dir: Path, steps: int | None = None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.path, self.now = run_dir, run_dir / "metrics.jsonl", BEGAN
        if steps:
            (run_dir / "run.json").write_text(json.dumps({"settings": SETTINGS, "steps": steps, "data": {}}))

    def write(self, line: dict[str, Any], after: float = 1.0) -> None:
        self.now += after
        self.raw(json.dumps(line | {"time": self.now}) + "\n")

    def raw(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text)

    def event(self, event: str, step: int, after: float = 1.0, **fields: Any) -> None:
        self.write({"event": event, "step": step} | fields, after)

    def steps(self, first: int, last: int, loss: float = 4.0) -> None:
        """Rows whose loss falls from `loss` by 1 / 100 a step."""
        for step in range(first, last + 1):
            self.write(row(step, loss - step / 100))

    def save(self, step: int, commit: bool = True) -> None:
        self.event("checkpoint", step, nbytes=NBYTES, stall_seconds=0.25)
        if commit:
            self.event("commit", step, after=2, nbytes=NBYTES, commit_seconds=2.0, write_seconds=1.0)


def row(step: int, loss: float | None) -> dict[str, Any]:
    """A step's row, but for its time."""
    known = {"lr": 0.003, "param_norm": 50.0, "grad_norm": 1.5, "step_seconds": 0.5}
    return {"step": step, "loss": loss} | known | {"communication_seconds": 0.125, "tokens_per_second": 256.0}


def eventful(run_dir: Path) -> Log:
    """A run of 60 steps to which everything happened once, and which has finished."""
    log = Log(run_dir, steps=60)
    log.event("launch", 0, ranks=4, settings=SETTINGS)
    memory = {"params": [2e6] * 4, "gradients": [4e6] * 4, "optimizer": [6e6] * 4, "resident": [1e8, 2e8, 3e8, 4e8]}
    log.event("memory", 0, **memory)
    log.steps(1, 10)
    log.save(10)
    log.event("injection", 12, kind="lr-spike", factor=100.0)
    log.steps(11, 14)
    log.write(row(15, None))  # not finite
    log.event("rollback", 15, target=10, reason="non-finite", action="skip", rollbacks=1, skipped=[[80, 120]])
    log.event("skip", 10, first=80, stop=120)
    log.steps(11, 20, loss=3.9)
    log.event("evaluation", 20, eval_loss=3.75, eval_tokens=4096, eval_seconds=0.5)
    log.save(20)
    log.event("prune", 10)
    log.steps(21, 30)
    log.save(30, commit=False)
    log.steps(31, 33)  # killed here
    log.event("restore", 20, after=60, restore_seconds=0.5)
    log.event("launch", 20, ranks=4, settings=SETTINGS)
    log.steps(21, 40)
    log.event("preemption", 40, reason="SIGUSR1")
    log.save(40)
    log.event("damage", 40, after=60, error="a shard's digest <b id=evil>differs</b> </script>")
    log.event("restore", 20, restore_seconds=0.5)
    log.event("launch", 20, ranks=2, settings=SETTINGS)
    log.event("hang", 21, seconds=600.0)
    log.event("launch", 20, ranks=2, settings=SETTINGS)
    log.steps(21, 60, loss=3.8)
    log.event("something new", 60, value=[1, 2])
    log.save(60)
    log.event("finish", 60, reason="finished")
    return log
