"""A restore on another number of ranks (N -> M), beside a restore of the same bytes on as many as saved them (N -> N).

    python benchmarks/reshard.py [--ranks 4] [--mib 512] [--rounds 7] [--dir .] [--json FILE]

Two states of the same size, each saved by N ranks and by N - 1:
  flat    what ZeRO-1 shards: four 1-d arrays (fp16 param; fp32 master, m, v), an interval of each a rank;
  tiles   a 2-d float64 field in the blocks of a Cartesian grid of ranks (4 = 2 x 2, 3 = 3 x 1).
The figures are those of the flat state, the larger one of shrinking and growing. Tiles are reported beside them: a part
of a block is verified by its 1 MiB chunks, and ranks whose blocks share rows of a saved block all read its chunks.

All restores are at verify="quick" (crc32c of every byte read), so that both sides check the same; at "full" N -> N has
the sha256 as well, which a partial read cannot have. Reads are cold: past the page cache by O_DIRECT where the file
system takes it, and what may be in the cache is dropped (POSIX_FADV_DONTNEED) before each. The time is that of the
slowest rank, from a common start until `restore` returned, into memory that was touched before. Bytes read are those of
all read system calls of the ranks (rchar of /proc/self/io), manifest and checksums included; needed are those of the
arrays. The cases take turns, in the same processes; a ratio compares cases of one round. The first round compares every
restored bit with what was saved, and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from _common import machine, median, meet, run_ranks, spread, table, versions, write_json

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_ckpt import Shard

TIME_TARGET, BYTES_TARGET = 1.25, 1.05
FLAT = {"param": "<f2", "master": "<f4", "m": "<f4", "v": "<f4"}


class Case(NamedTuple):
    """`layout`, saved by `old` ranks, restored on `new`."""

    layout: str
    old: int
    new: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.old} -> {self.new}"


def cases(ranks: int) -> list[Case]:
    """N -> N before what is compared with it."""
    pairs = [(ranks, ranks), (ranks, ranks - 1), (ranks - 1, ranks - 1), (ranks - 1, ranks)]
    return [Case(layout, *pair) for layout in ("flat", "tiles") for pair in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="N (default 4)")
    parser.add_argument("--mib", type=int, default=512, help="MiB of a state, all ranks together (default 512)")
    parser.add_argument("--rounds", type=int, default=7, help="alternations (default 7)")
    parser.add_argument("--dir", default=".", help="where to write; 4 x MiB, removed afterwards (default here)")
    parser.add_argument("--json", metavar="FILE", help="write the figures, every round and the machine to FILE")
    parser.add_argument("--worker", metavar="ROOT", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks < 2 or args.mib < 1 or args.rounds < 1:
        parser.error("--ranks must be at least 2, --mib and --rounds at least 1")
    if args.worker:
        work(Path(args.worker), args)
    else:
        launch(args)


def launch(args: argparse.Namespace) -> None:
    """Measure in one job, print the table, write the JSON."""
    load = f"{os.getloadavg()[0]:.2f}"
    sizes = [f"--{name}={getattr(args, name)}" for name in ("ranks", "mib", "rounds")]
    with tempfile.TemporaryDirectory(prefix="mpi_ckpt_benchmark_", dir=args.dir) as root:
        result = run_ranks(args.ranks, __file__, root, *sizes, timeout=120 + args.rounds * (20 + args.mib / 20))
    rows, figures = [], {"reshard_time_ratio": 0.0, "reshard_bytes_ratio": 0.0}
    for case in cases(args.ranks):
        seconds, same = (result[str(c)]["seconds"] for c in (case, Case(case.layout, case.old, case.old)))
        time_ratios = [a / b for a, b in zip(seconds, same, strict=True)]
        bytes_ratio = median(result[str(case)]["bytes"]) / result[str(case)]["needed"]
        row = [case, f"{result[str(case)]['needed'] / median(seconds) / 1e9:.2f}", f"{median(seconds):.3f}"]
        row += [spread(seconds), f"{median(time_ratios):.3f}", spread(time_ratios), f"{bytes_ratio:.3f}", ""]
        if case.layout == "flat" and case.new != case.old:
            figures["reshard_time_ratio"] = max(figures["reshard_time_ratio"], median(time_ratios))
            figures["reshard_bytes_ratio"] = max(figures["reshard_bytes_ratio"], bytes_ratio)
            row[-1] = f"<= {TIME_TARGET}, <= {BYTES_TARGET}"
        rows.append(row)
    described = machine(**result["versions"], load_before=load)
    print(f"\nCold restore of {args.mib} MiB at verify='quick': median of {args.rounds} rounds, and lowest - highest.")
    print("Ratios: time over N -> N, by rounds; bytes read over bytes needed.\n")
    print(table(["", "GB/s", "s", "", "time ratio", "", "bytes ratio", "targets"], rows))
    print("\n" + ", ".join(f"{key} {value}" for key, value in described.items()))
    write_json(args.json, figures, machine=described, rounds=result)


def work(root: Path, args: argparse.Namespace) -> None:
    """**Collective.** One rank of the measurement; rank 0 writes what was measured."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size != args.ranks:
        raise RuntimeError(f"found {comm.size} ranks, expected {args.ranks}: mpirun and mpi4py are of different MPIs")
    groups = {n: comm.Split(0 if comm.rank < n else MPI.UNDEFINED, comm.rank) for n in (args.ranks, args.ranks - 1)}
    nbytes = args.mib << 20
    for layout in ("flat", "tiles"):
        for group in groups.values():
            save(group, root, layout, nbytes)
            meet(comm)
    measured: dict[str, Any] = {str(case): {"seconds": [], "bytes": [], "needed": 0} for case in cases(args.ranks)}
    order = cases(args.ranks)
    for number in range(args.rounds + 1):
        order = [*order[1:], order[0]]  # every round begins with another
        for case in order:
            seconds, read, needed = restore(groups[case.new], root, case, nbytes, compare=number == 0)
            meet(comm)
            if number > 0:
                measured[str(case)]["seconds"].append(seconds)
                measured[str(case)]["bytes"].append(read)
                measured[str(case)]["needed"] = needed
    if comm.rank == 0:
        Path(args.result).write_text(json.dumps({**measured, "versions": versions("h5py")}))


def save(group: MPI.Comm, root: Path, layout: str, nbytes: int) -> None:
    """**Collective** in `group`; nothing on a rank that is not in it."""
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer

    if group == MPI.COMM_NULL:
        return
    with Checkpointer(root / f"{layout}-{group.size}", group, async_io=False) as checkpointer:
        checkpointer.save(1, build(layout, group, nbytes))


def restore(group: MPI.Comm, root: Path, case: Case, nbytes: int, *, compare: bool) -> tuple[float, int, int]:
    """**Collective** in `group`. Seconds of the slowest rank, bytes that all ranks read, bytes that they needed.

    RuntimeError if, asked to `compare`, a single bit is not what was saved.
    """
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer

    if group == MPI.COMM_NULL:
        return 0.0, 0, 0
    state = build(case.layout, group, nbytes)
    saved = {key: shard.array.tobytes() for key, shard in state.items()} if compare else {}
    for shard in state.values():
        shard.array.fill(-1)
    path = root / f"{case.layout}-{case.old}"
    with Checkpointer(path, group, read_only=True) as checkpointer:
        if group.rank == 0:
            drop_cached(path)
        meet(group)
        before, began = bytes_read(), time.perf_counter()
        checkpointer.restore(state, world_size="any", verify="quick")
        seconds, read = time.perf_counter() - began, bytes_read() - before
    for key, expected in saved.items():
        if state[key].array.tobytes() != expected:
            raise RuntimeError(f"{case}: {key!r} did not come back as it was saved")
    needed = sum(shard.array.nbytes for shard in state.values())
    return group.allreduce(seconds, MPI.MAX), group.allreduce(read), group.allreduce(needed)


def build(layout: str, group: MPI.Comm, nbytes: int) -> dict[str, Shard]:
    """**Local.** This rank's part of a state of about `nbytes`, its contents a function of the global position."""
    from mpi4py import MPI

    from mpi_ckpt import Shard, shard_range

    if layout == "flat":
        n = nbytes // sum(np.dtype(dtype).itemsize for dtype in FLAT.values())
        start, stop = shard_range(n, group.size, group.rank)
        position = np.arange(start, stop)
        return {key: Shard(scrambled(position, dtype, i), start, n) for i, (key, dtype) in enumerate(FLAT.items())}
    side = int((nbytes // 8) ** 0.5)
    dims = MPI.Compute_dims(group.size, 2)
    row, column = divmod(group.rank, dims[1])
    (top, bottom), (left, right) = shard_range(side, dims[0], row), shard_range(side, dims[1], column)
    position = np.arange(top, bottom)[:, None] * side + np.arange(left, right)
    return {"field": Shard(scrambled(position, "<f8", 0), (top, left), (side, side))}


def scrambled(position: np.ndarray, dtype: str, seed: int) -> np.ndarray:
    """Bits in which every shift shows and that no disk can compress: Knuth's multiplicative hash of the position."""
    itemsize = np.dtype(dtype).itemsize
    hashed = (position + seed + 1).astype("<u8") * np.uint64(0x9E3779B97F4A7C15)
    return (hashed >> np.uint64(64 - 8 * itemsize)).astype(f"<u{itemsize}").view(dtype)


def drop_cached(path: Path) -> None:
    """Let the page cache forget the files below `path`; they were fsynced when they were written."""
    for file in path.rglob("*.*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bytes_read() -> int:
    """Bytes that read system calls have given this process so far, from files and from the page cache."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


if __name__ == "__main__":
    main()
