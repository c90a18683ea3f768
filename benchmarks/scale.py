"""What grows with the number of steps, ranks and saves, and what must not: listing, manifest, leaks, extra memory.

    python benchmarks/scale.py [--ranks 4] [--steps 1000] [--manifest-ranks 16384] [--saves 1000] [--mib 128]
                               [--rounds 5] [--dir .] [--json FILE]

listing   `latest_step()` on all ranks among that many steps, each of which was saved and committed. The slowest rank's
          time; the directory is in the kernel's cache, as it is after the saves of a run.
manifest  of that many ranks with a block of four arrays each, their records simulated: build it (blocks tile the
          arrays), write it (with fsync), read it and check every field. One process; where it takes longer than its
          processor time, other programs were in its way.
leaks     of saves of a small state (a shard, plain values, a generator a rank), one after the other in the same
          processes, keep=3: growth of open descriptors, threads and resident memory from the end of a warm-up of a
          tenth as many. Asynchronous and synchronous; each rank counts.
memory    the peak of a rank's resident memory during one save, or one restore in place, of a shard of that many MiB,
          less its resident memory just before: VmHWM, reset by /proc/self/clear_refs, and VmRSS. Each in processes of
          its own that have not saved or restored anything before, so that every buffer and the import of h5py count;
          the most of all ranks. An asynchronous save keeps one copy of the shard besides, by design.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _common import machine, median, meet, run_ranks, spread, table, versions, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_ckpt.storage.manifest import ArrayRecord, ShardRecord

SIZES = {
    "ranks": (4, "ranks of the job"),
    "steps": (1000, "committed steps that are listed"),
    "manifest_ranks": (16384, "ranks of the simulated manifest"),
    "saves": (1000, "saves in one process that may leak"),
    "mib": (128, "MiB of a rank's shard where memory is measured"),
    "rounds": (5, "repetitions of what has a median; listing is repeated ten times as often"),
}
MEASURED = {"save": "a synchronous save", "restore": "a restore in place", "save_async": "an asynchronous save"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, help_text) in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{help_text} (default {default})")
    parser.add_argument("--dir", default=".", help="where to write; removed afterwards (default here)")
    parser.add_argument("--json", metavar="FILE", help="write the figures, every measurement and the machine to FILE")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if any(getattr(args, name) < 1 for name in SIZES):
        parser.error("every size must be at least 1")
    if args.worker:
        work(args)
    else:
        launch(args)


def launch(args: argparse.Namespace) -> None:
    """Run every part in jobs of its own, print the table, write the JSON."""
    load = f"{os.getloadavg()[0]:.2f}"
    sizes = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in SIZES]

    def run(part: str, directory: str, ranks: int = args.ranks) -> Any:
        return run_ranks(ranks, __file__, part, *sizes, "--dir", directory, timeout=300 + args.steps + args.saves)

    with tempfile.TemporaryDirectory(prefix="mpi_ckpt_benchmark_", dir=args.dir) as directory:
        measured = {"listing": run("listing", directory), "manifest": run("manifest", directory, 1)}
        measured["leaks"] = run("leaks", directory)
        memory: dict[str, list[float]] = {part: [] for part in MEASURED}
        for _ in range(args.rounds):
            for part, values in memory.items():
                values.append(max(run(part, directory)["mib"]))
            shutil.rmtree(Path(directory, "memory"))
    figures, rows = summary(args, {**measured, "memory": memory})
    described = machine(**measured["manifest"]["versions"], load_before=load)
    print("\nMedian, and lowest - highest; of what may leak, the worst rank, and lowest - highest of the ranks.\n")
    print(table(["", "unit", "median", "", "target"], rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in described.items()))
    write_json(args.json, figures, machine=described, measured={**measured, "memory": memory})


def summary(args: argparse.Namespace, measured: dict[str, Any]) -> tuple[dict[str, float], list[list[object]]]:
    """The figures by name, and the rows of the table."""
    figures: dict[str, float] = {}
    rows: list[list[object]] = []

    def row(what: str, unit: str, values: list[float], name: str = "", target: str = "", best: Any = median) -> None:
        rows.append([what, unit, f"{best(values):.2f}", spread(values), target])
        if name:
            figures[name] = best(values)

    row(f"latest_step() of {args.steps} steps", "ms", measured["listing"]["ms"], "latest_step_ms", "< 100")
    phases = measured["manifest"]["s"]
    together = [sum(times) for times in zip(*phases.values(), strict=True)]
    row(f"manifest of {args.manifest_ranks} ranks: all", "s", together, "manifest_16k_s", "< 1")
    for phase, seconds in {**phases, "processor time of all": measured["manifest"]["processor"]}.items():
        row(f"  {phase}", "s", seconds)
    for what, unit, target in (("fds", "descriptors", "0"), ("threads", "threads", "0"), ("mib", "MiB", "< 8")):
        worst = []
        for mode, growth in measured["leaks"]["growth"].items():
            row(f"{args.saves} {mode} saves", unit, growth[what], target=target, best=max)
            worst.append(max(growth[what]))
        figures[f"leak_{what}"] = max(worst)
    for part, title in MEASURED.items():
        name, target = ("", "") if part == "save_async" else (f"{part}_extra_mib", "<= 32")
        row(f"extra memory of {title}, {args.mib} MiB", "MiB", measured["memory"][part], name, target)
    return figures, rows


def work(args: argparse.Namespace) -> None:
    """**Collective.** One rank of one part; rank 0 writes what it measured."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size != (1 if args.worker == "manifest" else args.ranks):
        raise RuntimeError(f"found {comm.size} ranks: mpirun and mpi4py are of different MPIs")
    measured = PARTS[args.worker](comm, Path(args.dir), args)
    if comm.rank == 0:
        Path(args.result).write_text(json.dumps({**measured, "versions": versions("h5py")}))


def listing(comm: MPI.Comm, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """**Collective.** Milliseconds of `latest_step()`, of the slowest rank."""
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer

    root = directory / "listing"
    if comm.rank == 0:
        with Checkpointer(root, MPI.COMM_SELF, keep=None, async_io=False) as checkpointer:
            for step in range(1, args.steps + 1):
                checkpointer.save(step, {"step": step})
    meet(comm)
    milliseconds = []
    with Checkpointer(root, comm, read_only=True) as checkpointer:
        for _ in range(10 * args.rounds):
            meet(comm)
            began = time.perf_counter()
            latest = checkpointer.latest_step()
            milliseconds.append(1e3 * comm.allreduce(time.perf_counter() - began, MPI.MAX))
            if latest != args.steps:
                raise RuntimeError(f"the newest step is {latest}, expected {args.steps}")
    return {"ms": milliseconds}


def manifest(comm: MPI.Comm, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """**Local.** Seconds of each phase in the life of a large manifest, and processor seconds of all."""
    from mpi_ckpt.storage import names
    from mpi_ckpt.storage.manifest import build_manifest, read_manifest, write_manifest

    arrays, records = simulated(args.manifest_ranks)
    about: dict[str, Any] = {"step": 7, "save_id": "0123456789abcdef", "index": {}, "meta": {}, "environment": {}}
    path = names.step_dir(directory, 7)
    path.mkdir()
    seconds: dict[str, list[float]] = {"build": [], "write": [], "read and validate": []}
    processor = []
    for _ in range(args.rounds):
        busy, times = time.process_time(), [time.perf_counter()]
        built = build_manifest(records, arrays=arrays, created="", wall_clock_seconds=1.5, **about)
        times.append(time.perf_counter())
        write_manifest(path, built)
        times.append(time.perf_counter())
        found = read_manifest(path)
        times.append(time.perf_counter())
        processor.append(time.process_time() - busy)
        if found != built:
            raise RuntimeError("the manifest did not come back as it was written")
        del built, found  # a rank has one manifest at a time
        for phase, values in enumerate(seconds.values()):
            values.append(times[phase + 1] - times[phase])
    return {"s": seconds, "processor": processor, "nbytes": names.manifest_path(path).stat().st_size}


def simulated(ranks: int) -> tuple[dict[str, ArrayRecord], list[ShardRecord]]:
    """What so many ranks would report that share four flat arrays, uneven intervals and digests all different."""
    from mpi_ckpt import shard_range
    from mpi_ckpt.storage.manifest import ArrayRecord, BlockRecord, ShardRecord, ValuesRecord

    n, draw = 1_000_003 * ranks + 57, np.random.default_rng(0).bytes
    arrays = {key: ArrayRecord("<f4", (n,)) for key in ("param", "master", "m", "v")}
    records = []
    for rank in range(ranks):
        start, stop = shard_range(n, ranks, rank)
        blocks: dict[str, tuple[BlockRecord, ...]] = {
            key: (BlockRecord((start,), (stop - start,), 32768 + i * 4_001_792, 16_044_032 + 16 * i, draw(4).hex()),)
            for i, key in enumerate(arrays)
        }
        values = ValuesRecord(16_039_936, 300, draw(4).hex())
        digests = draw(32).hex(), draw(4).hex()
        records.append(ShardRecord(rank, f"rank{rank:05d}.h5", 16_044_096, *digests, blocks, values))
    return arrays, records


def leaks(comm: MPI.Comm, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """**Collective.** How much descriptors, threads and MiB of each rank grew over the saves."""
    from mpi_ckpt import Checkpointer, PerRank, Shard, shard_range

    start, stop = shard_range(4099, comm.size, comm.rank)
    rng = np.random.default_rng(comm.rank)
    growth: dict[str, dict[str, list[float]]] = {}
    for mode in ("asynchronous", "synchronous"):
        state = {"u": Shard(np.zeros(stop - start), start, 4099), "seconds": 0.0, "rng": PerRank(rng)}
        root = directory / mode
        with Checkpointer(root, comm, keep=3, async_io=mode == "asynchronous") as checkpointer:
            before: dict[str, float] = {}
            warm_up = max(1, args.saves // 10)
            for step in range(1, warm_up + args.saves + 1):
                checkpointer.save(step, state)
                if step == warm_up:
                    checkpointer.wait_until_finished()
                    before = usage()
            checkpointer.wait_until_finished()
            ranks = comm.allgather({what: value - before[what] for what, value in usage().items()})
        growth[mode] = {what: [rank[what] for rank in ranks] for what in before}
    return {"growth": growth}


def usage() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    fds, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return {"fds": fds, "threads": threads, "mib": status("VmRSS")}


def status(field: str) -> float:
    """A field of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def memory(part: str) -> Callable[[MPI.Comm, Path, argparse.Namespace], dict[str, Any]]:
    """The part that measures one save or restore, as the first one of its process."""

    def measure(comm: MPI.Comm, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
        from mpi_ckpt import Checkpointer, Shard

        n = args.mib << 17  # float64 in a shard of so many MiB
        array = np.random.default_rng(comm.rank).integers(0, 1 << 62, n).view(np.float64)
        state = {"u": Shard(array, comm.rank * n, comm.size * n)}
        with Checkpointer(directory / "memory", comm, async_io=part == "save_async") as checkpointer:
            gc.collect()
            meet(comm)
            before = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again: proc(5)
            if part == "restore":
                checkpointer.restore(state)
            else:
                checkpointer.save(2 if part == "save_async" else 1, state)
                checkpointer.wait_until_finished()
            extra = status("VmHWM") - before
        return {"mib": comm.allgather(extra)}

    return measure


PARTS = {"listing": listing, "manifest": manifest, "leaks": leaks, **{part: memory(part) for part in MEASURED}}

if __name__ == "__main__":
    main()
