"""What tests of whole training runs look at: the metrics, the committed steps, their global arrays and their meta."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpi_ckpt.parallel.mesh import Mesh
from mpi_ckpt.train.config import Settings
from mpi_ckpt.train.data import open_dataset
from mpi_ckpt.train.trainer import Trainer
from tests.launch import HANG, Job


def build_trainer(comm, tensor_ranks: int, settings: Settings) -> Trainer:
    """**Collective.** A trainer on synthetic data."""
    model = settings.model
    data = open_dataset(
        None,
        model.seq_len,
        settings.seed,
        vocab_size=model.vocab_size,
        total_tokens=settings.corpus_tokens,
        held_out=settings.eval_samples,
    )
    return Trainer.build(comm, settings, data, Mesh(comm, tensor_ranks))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The last row of each step."""
    return {row["step"]: row for row in lines(run_dir) if "event" not in row}


def losses(run_dir: Path) -> dict[int, str]:
    return {step: row["loss"].hex() for step, row in rows(run_dir).items()}


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Those of one name, without the time."""
    found = [row for row in lines(run_dir) if row.get("event") == name]
    return [{key: value for key, value in row.items() if key not in ("event", "time")} for row in found]


def committed(run_dir: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step_*/manifest.json"))


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())
    return found


def arrays(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of a step, read with plain h5py: the blocks of all ranks, in rank order."""
    parts: dict[str, list[np.ndarray]] = {}
    for shard in manifest(run_dir, step)["shards"]:
        with h5py.File(run_dir / "checkpoints" / f"step_{step:08d}" / shard["path"]) as file:
            for key, found in file["arrays"].items():
                blocks = found.values() if isinstance(found, h5py.Group) else [found]  # a rank may have several
                parts.setdefault(key, []).extend(block[...] for block in blocks)
    return {key: np.concatenate(pieces) for key, pieces in parts.items()}


def same_end(one: Path, other: Path, step: int) -> None:
    """Both runs have the same losses and end in the same state, to the bit, and remember the same."""
    assert losses(one) == losses(other)
    mine, theirs = arrays(one, step), arrays(other, step)
    assert mine.keys() == theirs.keys()
    assert all(mine[key].tobytes() == theirs[key].tobytes() for key in mine)
    mine, theirs = (manifest(run, step)["meta"] for run in (one, other))
    assert mine.pop("run_id") == json.loads((one / "run.json").read_bytes())["run_id"]
    assert theirs.pop("run_id")
    assert mine == theirs


def all_finite(run_dir: Path) -> bool:
    """Whether every array of every committed step is."""
    return all(np.isfinite(array).all() for step in committed(run_dir) for array in arrays(run_dir, step).values())


def wait_for_step(job: Job, run_dir: Path, step: int, timeout: float = HANG) -> None:
    """Until the metrics have that step, of a running job."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and job.process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and f'{{"step": {step},' in path.read_text():
            return
        time.sleep(0.002)
    raise AssertionError(f"no step {step}\n{job.output()}")
