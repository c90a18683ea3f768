"""What save, stall, restore and tiers share: options, the state, the clock, the order of the rounds, the report.

The state is what ZeRO-1 leaves on a rank: a flat shard of fp16 parameters and of fp32 master, m and v, 14 bytes a
parameter. A duration is that of the slowest rank; ranks that are done sleep, instead of spinning on a core that another
needs. After every measurement what it wrote is removed and the disk is left settled, so that no contender pays for the
write-back, the journal or the discards of the one before. Contenders take turns, and every round begins with another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _common import machine, median, meet, require, run_ranks, spread, table, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_ckpt.checkpoint.state import State

DTYPES = {"param": "<f2", "master": "<f4", "m": "<f4", "v": "<f4"}
BYTES_A_PARAMETER = 14
Seconds = dict[str, list[float]]  # of each contender, by rounds


def parse_arguments(
    description: str | None, mib: int, more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
) -> argparse.Namespace:
    """The options that the benchmarks have in common, and those that `more` adds. Ends the program for a wrong one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="MPI ranks (default 4)")
    parser.add_argument("--mib", type=int, default=mib, help=f"state of all ranks together, in MiB (default {mib})")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each contender (default 5)")
    parser.add_argument(
        "--dir", default=".", help="where the files go, for a while: a directory on the disk to measure"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures, every measurement and the machine to FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    more(parser)
    args = parser.parse_args()
    for name in ("ranks", "mib", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return args


def launch(script: str, args: argparse.Namespace, *modules: str, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run the ranks of `script` in a temporary directory below --dir; what rank 0 reports, and the machine."""
    require(*modules)
    load = f"{os.getloadavg()[0]:.2f}"
    with tempfile.TemporaryDirectory(prefix="mpi_ckpt_benchmark_", dir=args.dir) as directory:
        options = ["--mib", str(args.mib), "--rounds", str(args.rounds), "--dir", directory, *options]
        timeout = 120 + args.rounds * (30 + args.mib / 5)
        result = run_ranks(args.ranks, script, "--ranks", str(args.ranks), *options, timeout=timeout)
    return {**result, "machine": machine(**result.pop("versions"), load_before=load)}


def report(
    args: argparse.Namespace,
    result: dict[str, Any],
    title: str,
    rows: Sequence[Sequence[object]],
    figures: dict[str, list[float]],
    targets: dict[str, str],
) -> None:
    """Print what was measured, and the figures: ratios by rounds, of which the median counts. Write --json."""
    mib = result["nbytes"] / 2**20
    print(
        f"\n{title}: {args.ranks} ranks, {mib:.0f} MiB together, median of {args.rounds} rounds, and lowest - highest\n"
    )
    print(table(["", *result["columns"]], rows), end="\n\n")
    lines = [[name, f"{median(v):.3f}", spread(v), targets.get(name, "reported")] for name, v in figures.items()]
    print(table(["figure", "median", "", "target"], lines))
    print("\n" + ", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    write_json(args.json, {name: median(values) for name, values in figures.items()}, ratios=figures, **result)


def zero_state(comm: MPI.Comm, mib: int) -> State:
    """This rank's shards of a state of `mib` MiB in all, filled with noise, allocated as `ZeroOptimizer` does it."""
    from mpi_ckpt.layout import Shard, shard_range
    from mpi_ckpt.parallel.aligned import aligned_zeros

    numel = mib * 2**20 // BYTES_A_PARAMETER
    start, stop = shard_range(numel, comm.size, comm.rank)
    noise = np.random.default_rng(comm.rank)
    state = {}
    for key, dtype in DTYPES.items():
        array = aligned_zeros(stop - start, dtype)
        array[:] = noise.standard_normal(array.size, np.float32)
        state[key] = Shard(array, start, numel)
    return state


def arrays_of(state: State) -> dict[str, np.ndarray]:
    """The arrays of a flat state of shards."""
    return {key: shard.array for key, shard in state.items()}


def timed(comm: MPI.Comm, work: Callable[[], Any]) -> float:
    """**Collective.** Seconds that `work` takes on the slowest rank; the same on all ranks."""
    comm.Barrier()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    meet(comm)
    return max(comm.allgather(seconds))


def settle(comm: MPI.Comm, *rubbish: Path) -> None:
    """**Collective.** Remove these directories, and wait until the disk has nothing left to do."""
    meet(comm)
    if comm.rank == 0:
        for path in rubbish:
            shutil.rmtree(path, ignore_errors=True)
        os.sync()
    meet(comm)


def make_dir(comm: MPI.Comm, path: Path) -> Path:
    """**Collective.** The directory, there on every rank."""
    if comm.rank == 0:
        path.mkdir(parents=True)
    comm.Barrier()
    return path


def in_turns(rounds: int, contenders: dict[str, Callable[[int], float]]) -> Seconds:
    """**Collective.** Call every contender once to warm up, then once a round; what they return, the warm-up aside.

    A contender gets the number of the round, from 0 (the warm-up) on. Each round begins one place further on.
    """
    seconds: Seconds = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(contenders[name](number))
    return {name: values[1:] for name, values in seconds.items()}


def best(seconds: Seconds, names: Sequence[str]) -> str:
    """The fastest of `names` by its median: the limit. (The best of every single round would reward noise.)"""
    return min(names, key=lambda name: median(seconds[name]))


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """By rounds."""
    return [a / b for a, b in zip(above, below, strict=True)]


def rates(seconds: Sequence[float], nbytes: int) -> list[float]:
    """GB/s of each of the durations."""
    return [nbytes / s / 1e9 for s in seconds]


def leave_result(comm: MPI.Comm, path: str, **result: Any) -> None:
    """Rank 0: write what was measured, and the libraries' versions, where the launching process finds it."""
    if comm.rank == 0:
        Path(path).write_text(json.dumps({**result, "versions": _versions()}))


def _versions() -> dict[str, str]:
    import h5py
    import torch
    from mpi4py import MPI

    mpi = " ".join(MPI.Get_library_version().splitlines()[0].split())
    return {"mpi": mpi, "numpy": np.__version__, "h5py": h5py.__version__, "torch": torch.__version__}
