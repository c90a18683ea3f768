"""The rate of a cold restore into the arrays of a running program, beside a raw read and PyTorch DCP's load.

    python benchmarks/restore.py [--ranks 4] [--mib 1024] [--rounds 5] [--dir DIR] [--json FILE]

Ours checks what it reads: `full` the sha256 of every file, `quick` the crc32c of every MiB; DCP checks nothing. The
limit is the fastest raw read of the same files by the same ranks (O_DIRECT with one and with four threads a rank, and
through the page cache) into memory that was touched before; files elsewhere on the disk may be read at another rate.
Before every measurement all files are fsynced and dropped from the page cache (POSIX_FADV_DONTNEED). In the warm-up the
arrays are emptied first and compared afterwards. See `_io_bench.py` for how it is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from _common import median, spread
from _io_bench import (
    arrays_of,
    best,
    in_turns,
    launch,
    leave_result,
    make_dir,
    parse_arguments,
    rates,
    ratio,
    report,
    settle,
    timed,
    zero_state,
)

QUICK, FULL, DCP = "ours, quick (crc32c)", "ours, full (sha256)", "PyTorch DCP (no check)"
DIRECT, DIRECT_4, BUFFERED = "limit: O_DIRECT", "limit: O_DIRECT, 4 threads", "limit: buffered"
RAW = (DIRECT, DIRECT_4, BUFFERED)
TARGETS = {"restore_quick_vs_raw": ">= 0.9", "restore_full_vs_raw": ">= 0.8", "restore_vs_dcp": ">= 1.5"}


def main() -> None:
    args = parse_arguments(__doc__, mib=1024)
    if args.worker:
        work(args)
        return
    result = launch(__file__, args, "torch", "safetensors", "h5py")
    seconds = result["seconds"]
    raw = best(seconds, RAW)
    figures = {
        "restore_quick_vs_raw": ratio(seconds[raw], seconds[QUICK]),
        "restore_full_vs_raw": ratio(seconds[raw], seconds[FULL]),
        "restore_vs_dcp": ratio(seconds[DCP], seconds[FULL]),
    }
    rows = []
    for name, values in seconds.items():
        gb = rates(values, result["nbytes"])
        rows.append([name, f"{median(values):.3f}", f"{median(gb):.2f}", spread(gb)])
    title = f"Cold restore in place (the raw limit is {raw!r})"
    report(args, {**result, "columns": ["s", "GB/s", ""]}, title, rows, figures, TARGETS)


def work(args: argparse.Namespace) -> None:
    """**Collective.** One rank of the measurement."""
    import _io_peers as peers
    from _torch_peer import join_gloo
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer

    comm, directory = MPI.COMM_WORLD, Path(args.dir)
    join_gloo(comm)
    state = zero_state(comm, args.mib)
    arrays = arrays_of(state)
    expected = {key: array.copy() for key, array in arrays.items()}
    raw, tensors = peers.joined(arrays), peers.dcp_state(arrays, comm.rank)
    raw_file = directory / "ours" / "step_00000001" / f"rank{comm.rank:05d}.h5"
    peers.dcp_save(make_dir(comm, directory / "dcp"), tensors)

    def cold(read: Callable[[], object]) -> Callable[[int], float]:
        def measure(number: int) -> float:
            if comm.rank == 0:
                peers.drop_from_cache(directory)
            settle(comm)
            return timed(comm, read)

        return measure

    def in_place(read: Callable[[], object]) -> Callable[[int], float]:
        measure = cold(read)

        def measure_and_compare(number: int) -> float:
            if number > 0:
                return measure(number)
            for array in arrays.values():
                array.fill(0)
            seconds = measure(number)
            for key, array in arrays.items():
                if not np.array_equal(array, expected[key]):
                    raise RuntimeError(f"{key} did not come back as it was saved")
            return seconds

        return measure_and_compare

    with Checkpointer(directory / "ours", comm, async_io=False, keep=None) as checkpointer:
        checkpointer.save(1, state)
        seconds = in_turns(
            args.rounds,
            {
                QUICK: in_place(lambda: checkpointer.restore(state, verify="quick")),
                FULL: in_place(lambda: checkpointer.restore(state)),
                DIRECT: cold(lambda: peers.read_raw(raw_file, raw, direct=True, threads=1)),
                DIRECT_4: cold(lambda: peers.read_raw(raw_file, raw, direct=True, threads=4)),
                BUFFERED: cold(lambda: peers.read_raw(raw_file, raw, direct=False, threads=1)),
                DCP: in_place(lambda: peers.dcp_load(directory / "dcp", tensors)),
            },
        )
    nbytes = comm.allreduce(sum(array.nbytes for array in arrays.values()))
    leave_result(comm, args.result, seconds=seconds, nbytes=nbytes)


if __name__ == "__main__":
    main()
