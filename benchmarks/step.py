"""The time of one whole training step, beside PyTorch's DistributedDataParallel + ZeroRedundancyOptimizer over gloo.

    python benchmarks/step.py [--json FILE] [--rounds 7]

All sides train the same model from the same parameters on the same batches, with the same ranks and one thread a rank.
A step is all of it: the batch, forward, backward, the exchange of gradients and parameters, AdamW, and the loss as a
number; ours also has the norms, the check of the replicas and the line of metrics, as the training loop has them. Ours
keeps fp16 parameters and an fp32 master, as it always does; PyTorch's side is float32, its usual way on processors.
The figures compare with PyTorch's classes as they are by default; the rows "tuned" show them with every switch that
helps (see `_torch_peer.py`).

The sides live in the same ranks of one job and take turns, a window of about a second each: ours, torch, tuned, ours...
A machine that drifts by 30 % within a minute then slows all alike, which jobs one after the other would not show. Who
waits costs the others nothing: our ranks are outside MPI then, and gloo's threads sleep in the kernel. A window's time
is the slowest rank's; ranks that are done early sleep, instead of spinning on a core that another needs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _common import machine, median, meet, require, run_ranks, spread, table, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_ckpt.model.config import ModelConfig
    from mpi_ckpt.train.data import Dataset

SIZES: dict[str, dict[str, int]] = {
    "small": {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64, "seq_len": 16},
    "large": {"n_layer": 4, "n_embd": 256, "n_head": 8, "vocab_size": 256, "seq_len": 128},
}
RANKS = {"small": 4, "large": 2}
TARGETS = {"small": 0.10, "large": 0.95}
BATCH = 4  # sequences a rank
LEARNING_RATE = 1e-3
ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WINDOW_SECONDS = 1.0
CHECKED_STEPS = 5  # in which the losses of all sides must agree
TOLERANCE = 1e-2  # of these losses: fp16 parameters bring up to 3e-3; with float32 parameters they agree to 2e-6
WARM_UP_STEPS = 10

Step = Callable[[int], float]  # number of the step from 0 -> loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures, every window and the machine to FILE")
    parser.add_argument("--rounds", type=int, default=7, help="alternations for each size (default 7)")
    parser.add_argument("--worker", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.worker:
        work(args.worker, args.rounds, args.result)
    else:
        launch(args.rounds, args.json)


def launch(rounds: int, json_path: str | None) -> None:
    """Measure every size in a job of its own, print the table, write the JSON."""
    require("torch")
    load = f"{os.getloadavg()[0]:.2f}"  # other programs at work make every figure worse, ours most: its ranks spin
    results = {
        size: run_ranks(RANKS[size], __file__, size, "--rounds", str(rounds), timeout=120 + 15 * rounds)
        for size in SIZES
    }
    figures, rows = {}, []
    for size, result in results.items():
        windows = result["milliseconds"]
        ratios = {name: [a / b for a, b in zip(windows["ours"], windows[name], strict=True)] for name in windows}
        figures[f"step_{size}_vs_torch"] = median(ratios["torch"])
        for name in windows:
            target = f"<= {TARGETS[size]:.2f}" if name == "torch" else ""
            milliseconds = [f"{median(windows[name]):.2f}", spread(windows[name])]
            ratio = [f"{median(ratios[name]):.3f}", spread(ratios[name])] if name != "ours" else ["", ""]
            rows.append([f"{size}, {RANKS[size]} ranks: {name}", *milliseconds, *ratio, target])
    described = machine(**results["small"]["versions"], load_before=load)
    print(f"\nOne training step: median of {rounds} windows, and lowest - highest. Ratio: ours / theirs, by rounds.\n")
    print(table(["", "ms", "", "ratio", "", "target"], rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in described.items()))
    write_json(json_path, figures, machine=described, windows=results)


def work(size: str, rounds: int, result: str) -> None:
    """**Collective.** One rank of the measurement of `size`; rank 0 writes the windows to the file `result`."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size != RANKS[size]:
        raise RuntimeError(f"found {comm.size} ranks, expected {RANKS[size]}: mpirun and mpi4py are of different MPIs")
    with tempfile.TemporaryDirectory() as run_dir:
        sides = build(comm, size, Path(run_dir))
        done = dict.fromkeys(sides, CHECKED_STEPS)  # `build` has taken these

        def measure(name: str, steps: int) -> float:
            done[name] += steps
            return window(comm, sides[name], done[name] - steps, steps)

        steps_a_window = {}
        for name in sides:
            measure(name, WARM_UP_STEPS)
            steps_a_window[name] = max(1, round(WINDOW_SECONDS / measure(name, WARM_UP_STEPS)))
        milliseconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name in sides:
                milliseconds[name].append(1e3 * measure(name, steps_a_window[name]))
    if comm.rank == 0:
        measured = {"milliseconds": milliseconds, "steps_a_window": steps_a_window, "versions": versions()}
        Path(result).write_text(json.dumps(measured))


def build(comm: MPI.Comm, size: str, run_dir: Path) -> dict[str, Step]:
    """**Collective.** The step of every side. Raises RuntimeError unless all have the same losses."""
    from _torch_peer import join_gloo, torch_step

    from mpi_ckpt.model.config import ModelConfig
    from mpi_ckpt.model.gpt import MiniGPT
    from mpi_ckpt.train.data import open_dataset

    config = ModelConfig(**SIZES[size])
    data = open_dataset(None, config.seq_len, 0, vocab_size=config.vocab_size, total_tokens=1_000_000)
    global_batch = BATCH * comm.size

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        return data.batch(number * global_batch, global_batch, comm.rank, comm.size)

    flat = MiniGPT(config, BATCH).initial_parameters(0)
    join_gloo(comm)
    sides = {
        "ours": our_step(comm, config, data, run_dir),
        "torch": torch_step(config, flat, batch, {"lr": LEARNING_RATE, **ADAMW}, tuned=False),
        "torch, tuned": torch_step(config, flat, batch, {"lr": LEARNING_RATE, **ADAMW}, tuned=True),
    }
    losses = [[comm.allreduce(step(k)) / comm.size for k in range(CHECKED_STEPS)] for step in sides.values()]
    if np.ptp(losses, axis=0).max() > TOLERANCE:
        raise RuntimeError(f"the sides do not train the same model; losses of {', '.join(sides)}: {losses}")
    return sides


def our_step(comm: MPI.Comm, config: ModelConfig, data: Dataset, run_dir: Path) -> Step:
    """**Collective.** A function that takes the run's next step as the training loop does, and returns its loss."""
    from mpi_ckpt.train.checks import check_replicas
    from mpi_ckpt.train.config import Settings
    from mpi_ckpt.train.metrics import MetricsLog
    from mpi_ckpt.train.trainer import Trainer

    settings = Settings(
        model=config,
        global_batch=BATCH * comm.size,
        lr=LEARNING_RATE,
        beta1=ADAMW["betas"][0],
        beta2=ADAMW["betas"][1],
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        decay="all",  # as the peer
        clip_norm=0.0,
    )
    trainer = Trainer.build(comm, settings, data)
    log = MetricsLog(run_dir) if comm.rank == 0 else None

    def step(number: int) -> float:
        result = trainer.step()
        check_replicas(comm, number, result.param_norm)
        if log:
            log.write({"step": number, **result._asdict()})
        return result.loss

    return step


def window(comm: MPI.Comm, step: Step, first: int, count: int) -> float:
    """**Collective.** Seconds a step over `count` steps of the slowest rank; the same on all ranks."""
    comm.Barrier()
    start = time.perf_counter()
    for number in range(first, first + count):
        step(number)
    seconds = time.perf_counter() - start
    meet(comm)
    return max(comm.allgather(seconds)) / count


def versions() -> dict[str, str]:
    """The libraries that the sides ran on."""
    import torch
    from mpi4py import MPI

    mpi = " ".join(MPI.Get_library_version().splitlines()[0].split())
    return {"mpi": mpi, "numpy": np.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main()
