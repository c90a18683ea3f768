"""How training scales with the number of ranks, what checkpoints cost it, and what overlapping the reduction gains.

    python benchmarks/train_scaling.py [--ranks 1,2,4] [--rounds 3] [--windows 6] [--json FILE] [--plot FILE.png]

*Scaling.* The training step of the program, checkpointed asynchronously every few steps, over rank counts: strong (the
same global batch on more ranks) and weak (the same batch a rank). Each measurement is a job of its own; a round goes
through all of them. Parallel efficiency is against one rank: T(1) / (N T(N)), weak T(1) / T(N). More ranks than cores
cannot be efficient, and are measured all the same. A step's time on the slowest rank is split into compute,
communication (in collectives, waiting included) and the stall of checkpoints, of rank 0.

*Checkpoint overhead.* In one run, windows of 10 s with one save at the beginning alternate with windows without, of a
state of at least 200 MB. `ckpt_overhead` is the time a step with, over the time without, minus one: stalls and
slow-down together, the median of the pairs.

*Overlap.* Two trainers in one job take turns of a second: gradients reduced at the end, or in buckets while the
backward still runs. `overlap_gain` is the time without over the time with.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import machine, median, meet, require, run_ranks, spread, table, versions, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_ckpt.train.trainer import Trainer

SCALING_MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 8, "vocab_size": 256, "seq_len": 64}
BATCH = 4  # sequences a rank: in weak scaling, and of the largest rank count in strong scaling
SCALING_STEPS, SAVE_EVERY = 30, 10
LARGE_MODEL = {"n_layer": 5, "n_embd": 512, "n_head": 8, "vocab_size": 256, "seq_len": 64}  # 16 M parameters, 224 MB
WINDOW_SECONDS = 10.0  # one checkpoint in each
TURN_SECONDS = 1.0
WARM_UP_STEPS = 3
TARGET = 0.035  # of the literature, for frequent checkpointing: CheckFreq (FAST'21)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=rank_counts, default=[1, 2, 4], help="rank counts (default 1,2,4)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each rank count (default 3)")
    parser.add_argument("--windows", type=int, default=6, help="pairs of windows with and without (default 6)")
    parser.add_argument("--dir", default=".", help="where checkpoints go, for a while: on the disk to measure")
    parser.add_argument("--json", metavar="FILE", help="write the figures, every measurement and the machine to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw the scaling to FILE (PNG; needs matplotlib)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.rounds, args.windows) < 1:
        parser.error("--rounds and --windows must be at least 1")
    if args.worker:
        work(args)
        return
    if args.plot:
        require("matplotlib")
    load = f"{os.getloadavg()[0]:.2f}"
    with tempfile.TemporaryDirectory(prefix="mpi_ckpt_benchmark_", dir=args.dir) as directory:
        rows = scaling_rows(args, directory)
        most = max(args.ranks)
        overhead = run_ranks(
            most, __file__, "overhead", "--windows", str(args.windows), "--dir", directory, timeout=900
        )
        overlap = run_ranks(2, __file__, "overlap", "--rounds", str(max(7, args.rounds)), timeout=300)
    report(args, rows, overhead, overlap, load)


def rank_counts(text: str) -> list[int]:
    """'1,2,4' as numbers; 1 is always among them, for efficiency is measured against it."""
    counts = sorted({1, *(int(part) for part in text.split(","))})
    if counts[0] < 1:
        raise argparse.ArgumentTypeError("rank counts are at least 1")
    return counts


# -- the jobs ---------------------------------------------------------------------------------------------------------


def scaling_rows(args: argparse.Namespace, directory: str) -> list[dict[str, Any]]:
    """Every mode and rank count: medians over the rounds, of which each goes through all of them."""
    strong = BATCH * max(args.ranks)
    jobs = [("strong", n, strong) for n in args.ranks] + [("weak", n, BATCH * n) for n in args.ranks]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(args.rounds):
        for mode, ranks, batch in jobs:
            measured = run_ranks(ranks, __file__, "scaling", "--batch", str(batch), "--dir", directory, timeout=300)
            found.setdefault((mode, ranks), []).append(measured)
    rows = []
    for mode, ranks, batch in jobs:
        of_rounds = found[mode, ranks]
        row: dict[str, Any] = {name: median([each[name] for each in of_rounds]) for name in of_rounds[0]}
        seconds = [each["step_seconds"] for each in of_rounds]
        one = median([each["step_seconds"] for each in found[mode, 1]])
        efficiency = one / row["step_seconds"] / (ranks if mode == "strong" else 1)
        tokens = batch * SCALING_MODEL["seq_len"] / row["step_seconds"]
        row |= {"mode": mode, "ranks": ranks, "global_batch": batch, "tokens_per_second": tokens}
        rows.append(row | {"efficiency": efficiency, "step_seconds_of_rounds": seconds})
    return rows


def work(args: argparse.Namespace) -> None:
    """**Collective.** One rank of one of the jobs."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "scaling": lambda: measure_scaling(comm, args.batch, Path(args.dir)),
        "overhead": lambda: measure_overhead(comm, args.windows, Path(args.dir)),
        "overlap": lambda: measure_overlap(comm, args.rounds),
    }
    result = jobs[args.worker]()
    if comm.rank == 0:
        Path(args.result).write_text(json.dumps(result))


def build(comm: MPI.Comm, model: dict[str, int], global_batch: int, *, overlap: bool = False) -> Trainer:
    """**Collective.** A trainer of the program, warm."""
    from mpi_ckpt.model.config import ModelConfig
    from mpi_ckpt.train.config import Settings
    from mpi_ckpt.train.data import open_dataset
    from mpi_ckpt.train.trainer import Trainer

    settings = Settings(model=ModelConfig(**model), global_batch=global_batch, overlap=overlap)
    data = open_dataset(None, model["seq_len"], 0, vocab_size=model["vocab_size"], total_tokens=65536)
    trainer = Trainer.build(comm, settings, data)
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    return trainer


def measure_scaling(comm: MPI.Comm, global_batch: int, directory: Path) -> dict[str, Any]:
    """**Collective.** Seconds of a step and of its parts."""
    from mpi_ckpt import Checkpointer

    trainer, stalls = build(comm, SCALING_MODEL, global_batch), []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            stalls.append(event["stall_seconds"])

    with Checkpointer(
        directory / "scaling", comm, every=f"{SAVE_EVERY}steps", keep=1, on_event=on_event
    ) as checkpointer:
        checkpointer.save(0, trainer.state, overwrite=True)  # the first save touches its buffers: not what steps pay
        checkpointer.wait_until_finished()
        stalls.clear()
        communication = trainer.optimizer.communication_seconds
        comm.Barrier()
        began = time.perf_counter()
        for step in range(1, SCALING_STEPS + 1):
            trainer.step()
            checkpointer.save_if_due(step, trainer.state, overwrite=True)
        seconds = max(comm.allgather(time.perf_counter() - began)) / SCALING_STEPS
        communication = (trainer.optimizer.communication_seconds - communication) / SCALING_STEPS
        checkpointer.discard_after(-1)  # the next job of this benchmark finds an empty directory
    stall = sum(stalls) / SCALING_STEPS
    parts = {"communication_seconds": communication, "checkpoint_stall_seconds": stall}
    return {"step_seconds": seconds, "compute_seconds": seconds - communication - stall, **parts}


def measure_overhead(comm: MPI.Comm, pairs: int, directory: Path) -> dict[str, Any]:
    """**Collective.** Seconds a step in windows with a checkpoint and in windows without, side by side."""
    from mpi_ckpt import Checkpointer

    trainer, committed = build(comm, LARGE_MODEL, comm.size), threading.Event()
    stalls: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            stalls.append(event["stall_seconds"])
        elif event["event"] == "commit":
            committed.set()

    seconds: dict[bool, list[float]] = {True: [], False: []}
    with Checkpointer(directory / "overhead", comm, keep=2, on_event=on_event) as checkpointer:

        def save(step: int) -> None:
            committed.clear()
            checkpointer.save(step, trainer.state)

        save(0)
        checkpointer.wait_until_finished()
        stalls.clear()
        for pair in range(1, pairs + 1):
            for with_save in (True, False) if pair % 2 else (False, True):  # what drifts must not favour either
                comm.Barrier()
                began, steps = time.perf_counter(), 0
                if with_save:
                    save(pair)
                while comm.bcast(time.perf_counter() - began < WINDOW_SECONDS):
                    trainer.step()
                    steps += 1
                seconds[with_save].append((time.perf_counter() - began) / steps)
                if with_save and not committed.is_set():
                    raise RuntimeError(f"a save took more than {WINDOW_SECONDS:g} s: the next window would pay for it")
    nbytes = comm.allreduce(sum(shard.array.nbytes for shard in trainer.optimizer.state().values()))
    names = {"with_seconds": seconds[True], "without_seconds": seconds[False]}
    mine = {"ranks": comm.size, "nbytes": nbytes, "stall_seconds": stalls, "versions": versions()}
    return names | mine


def measure_overlap(comm: MPI.Comm, rounds: int) -> dict[str, Any]:
    """**Collective.** Seconds a step of the two trainers, which take turns."""
    trainers = {overlap: build(comm, SCALING_MODEL, BATCH * comm.size, overlap=overlap) for overlap in (False, True)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for overlap in (False, True) if number % 2 else (True, False):
            meet(comm)
            began, steps = time.perf_counter(), 0
            while comm.bcast(time.perf_counter() - began < TURN_SECONDS):
                trainers[overlap].step()
                steps += 1
            seconds[overlap].append((time.perf_counter() - began) / steps)
    return {"with_seconds": seconds[True], "without_seconds": seconds[False]}


# -- what is printed --------------------------------------------------------------------------------------------------


def report(
    args: argparse.Namespace, rows: list[dict[str, Any]], overhead: dict[str, Any], overlap: dict[str, Any], load: str
) -> None:
    """Print the tables, write --json and --plot."""
    here = machine(**overhead.pop("versions"), load_before=load)
    head = ["", "ranks", "tokens/s", "ms a step", "", "compute", "communication", "ckpt stall", "efficiency"]
    print(f"\nScaling, median of {args.rounds} rounds on {here['cores']} cores, milliseconds a step\n")
    print(table(head, [_line(row) for row in rows]))
    costs = [a / b - 1 for a, b in zip(overhead["with_seconds"], overhead["without_seconds"], strict=True)]
    gains = [a / b for a, b in zip(overlap["without_seconds"], overlap["with_seconds"], strict=True)]
    figures = {"ckpt_overhead": median(costs), "overlap_gain": median(gains)}
    figures |= {f"{row['mode']}_efficiency_{row['ranks']}": row["efficiency"] for row in rows if row["ranks"] > 1}
    stall = 1e3 * median(overhead["stall_seconds"])
    print(
        f"\n{overhead['ranks']} ranks, a checkpoint of {overhead['nbytes'] / 1e6:.0f} MB every {WINDOW_SECONDS:g} s: "
        f"{1e3 * median(overhead['with_seconds']):.1f} ms a step with, {1e3 * median(overhead['without_seconds']):.1f} "
        f"without, {args.windows} pairs of windows; stall {stall:.1f} ms\n"
    )
    lines = [
        ["ckpt_overhead", f"{median(costs):.4f}", f"{min(costs):.4f} - {max(costs):.4f}", f"<= {TARGET}"],
        ["overlap_gain", f"{median(gains):.3f}", spread(gains), "reported"],
    ]
    print(table(["figure", "median", "", "target"], lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in here.items()))
    write_json(args.json, figures, scaling=rows, overhead=overhead, overlap=overlap, machine=here)
    if args.plot:
        plot(rows, args.plot)


def _line(row: dict[str, Any]) -> list[object]:
    parts = [row[f"{name}_seconds"] for name in ("compute", "communication", "checkpoint_stall")]
    times = [f"{1e3 * part:.2f}" for part in parts]
    rounds = spread([1e3 * s for s in row["step_seconds_of_rounds"]])
    step = f"{1e3 * row['step_seconds']:.2f}"
    return [
        row["mode"],
        row["ranks"],
        f"{row['tokens_per_second']:.0f}",
        step,
        rounds,
        *times,
        f"{row['efficiency']:.2f}",
    ]


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Throughput beside the ideal line, and where the time of a step goes, of both modes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    for column, mode in enumerate(("strong", "weak")):
        of_mode = [row for row in rows if row["mode"] == mode]
        ranks = [row["ranks"] for row in of_mode]
        speed = [row["tokens_per_second"] for row in of_mode]
        above, below = axes[0][column], axes[1][column]
        above.plot(ranks, speed, "o-", label="measured")
        above.plot(ranks, [speed[0] * n for n in ranks], "--", color="0.6", label="ideal")
        above.set(title=f"{mode} scaling", xlabel="ranks", ylabel="tokens / s", xscale="log", xticks=ranks)
        above.set_xticklabels(ranks)
        above.set_ylim(bottom=0)
        above.minorticks_off()
        above.legend(frameon=False)
        bottom = [0.0] * len(ranks)
        for part in ("compute", "communication", "checkpoint_stall"):
            height = [1e3 * row[f"{part}_seconds"] for row in of_mode]
            below.bar(list(map(str, ranks)), height, bottom=bottom, label=part.replace("_", " "), width=0.6)
            bottom = [b + h for b, h in zip(bottom, height, strict=True)]
        below.set(xlabel="ranks", ylabel="ms a step")
        below.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
