"""The real trainer and checkpointer, and a note of every sample that a step has trained on.

    python -m tests.programs.samples DIR SAMPLES GLOBAL_BATCH SAVE_EVERY STOP

Goes on from the newest step in DIR, on any number of ranks, up to step STOP, which it does not save unless it is due.
Appends lines {"step", "rank", "ids"} to DIR/ids-<rank>.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpi_ckpt import Checkpointer
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions
from mpi_ckpt.model.config import ModelConfig
from mpi_ckpt.train.config import Settings
from mpi_ckpt.train.data import Dataset
from mpi_ckpt.train.trainer import Trainer

HELD_OUT = 3
MODEL = ModelConfig(n_layer=1, n_embd=4, n_head=1, vocab_size=4, seq_len=2)


class NotedDataset(Dataset):
    """Keeps what a batch has read."""

    noted: np.ndarray

    def sample_ids(self, cursor: int, count: int) -> np.ndarray:
        self.noted = super().sample_ids(cursor, count)
        return self.noted


def main(directory: str, samples: int, global_batch: int, save_every: int, stop: int) -> None:
    comm = MPI.COMM_WORLD
    tokens = np.zeros((samples + HELD_OUT) * MODEL.seq_len + 1, np.uint16)
    data = NotedDataset(tokens, MODEL.seq_len, 0, vocab_size=4, name="zeros", held_out=HELD_OUT)
    settings = Settings(model=MODEL, global_batch=global_batch, grad_accum=3, token_noise=0.1, eval_samples=HELD_OUT)
    trainer = Trainer.build(comm, settings, data)
    note = Path(directory) / f"ids-{comm.rank}.jsonl"
    with (
        Checkpointer(Path(directory) / "checkpoints", comm, every=f"{save_every}steps") as checkpointer,
        note.open("a") as log,
    ):
        if checkpointer.restore(trainer.state, world_size="any"):
            trainer.restored()
        progress = trainer.state["progress"]
        while progress["step"] < stop:
            gradient = trainer.gradients()
            ids = data.noted.tolist()
            trainer.evaluate()
            trainer.update(gradient)
            log.write(json.dumps({"step": progress["step"], "rank": comm.rank, "ids": ids}) + "\n")
            checkpointer.save_if_due(progress["step"], trainer.state)


if __name__ == "__main__":
    abort_on_uncaught_exceptions(MPI.COMM_WORLD)
    main(sys.argv[1], *map(int, sys.argv[2:]))
