"""The rate of a synchronous save, beside the limits of the machine and beside other ways to save the same state.

    python benchmarks/save.py [--ranks 4] [--mib 1024] [--rounds 5] [--dir DIR] [--json FILE]

Ours writes one HDF5 file a rank with sha256 and crc32c, fsyncs everything, and commits a manifest. Limits: the fastest
raw write + fsync of as many bytes by the same ranks (O_DIRECT with one and with four threads a rank, and through the
page cache), and the rate at which the same ranks take the sha256 of the state in memory. See `_io_bench.py` for how it
is measured and `_io_peers.py` for the peers; but for plain h5py none of them hashes anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

OURS, SHA256 = "ours: sha256, crc32c, fsync, manifest", "limit: sha256 from memory"
DIRECT, DIRECT_4, BUFFERED = "limit: O_DIRECT", "limit: O_DIRECT, 4 threads", "limit: buffered"
DCP, GATHER, H5PY = "PyTorch DCP", "gather to rank 0, torch.save", "h5py a rank, then sha256"
TORCH, SAFETENSORS, SHARED = "torch.save a rank", "safetensors a rank", "one shared file, MPI.File"
RAW = (DIRECT, DIRECT_4, BUFFERED)
TARGETS = {"save_vs_limit": ">= 0.9", "save_vs_dcp": ">= 2", "save_vs_gather": ">= 5", "save_vs_h5py": ">= 1.7"}


def main() -> None:
    args = parse_arguments(__doc__, mib=1024)
    if args.worker:
        work(args)
        return
    result = launch(__file__, args, "torch", "safetensors", "h5py")
    seconds = result["seconds"]
    raw = best(seconds, RAW)
    slower = max(raw, SHA256, key=lambda name: median(seconds[name]))
    over = {"limit": slower, "raw": raw, "dcp": DCP, "gather": GATHER, "h5py": H5PY}
    figures = {f"save_vs_{name}": ratio(seconds[peer], seconds[OURS]) for name, peer in over.items()}
    rows = []
    for name, values in seconds.items():
        gb = rates(values, result["nbytes"])
        rows.append([name, f"{median(values):.3f}", f"{median(gb):.2f}", spread(gb)])
    title = f"Synchronous save with fsync (the raw limit is {raw!r}, the lower one {slower!r})"
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
    raw, tensors = peers.joined(arrays), peers.dcp_state(arrays, comm.rank)

    def into_new_directory(save: Callable[[Path], Any]) -> Callable[[int], float]:
        def measure(number: int) -> float:
            place = make_dir(comm, directory / "peer")
            seconds = timed(comm, lambda: save(place))
            settle(comm, place)
            return seconds

        return measure

    def a_file(save: Callable[..., Any], *what: Any, **how: Any) -> Callable[[int], float]:
        return into_new_directory(lambda place: save(place / f"rank{comm.rank}", *what, **how))

    with Checkpointer(directory / "ours", comm, async_io=False, keep=None) as checkpointer:

        def ours(number: int) -> float:
            seconds = timed(comm, lambda: checkpointer.save(number, state))
            settle(comm, directory / "ours" / f"step_{number:08d}")
            return seconds

        seconds = in_turns(
            args.rounds,
            {
                OURS: ours,
                DIRECT: a_file(peers.write_raw, raw, direct=True, threads=1),
                DIRECT_4: a_file(peers.write_raw, raw, direct=True, threads=4),
                BUFFERED: a_file(peers.write_raw, raw, direct=False, threads=1),
                SHA256: lambda number: timed(comm, lambda: peers.hash_arrays(arrays)),
                DCP: into_new_directory(lambda place: peers.dcp_save(place, tensors)),
                GATHER: into_new_directory(lambda place: peers.save_gathered(place / "all", arrays, comm)),
                H5PY: a_file(peers.save_h5py, arrays),
                TORCH: a_file(peers.save_torch, arrays),
                SAFETENSORS: a_file(peers.save_safetensors, arrays),
                SHARED: into_new_directory(lambda place: peers.save_shared(place / "all", arrays, comm)),
            },
        )
    nbytes = comm.allreduce(sum(array.nbytes for array in arrays.values()))
    leave_result(comm, args.result, seconds=seconds, nbytes=nbytes)


if __name__ == "__main__":
    main()
