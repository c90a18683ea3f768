"""A launch that saves and waits as it is told.

    python -m tests.programs.writer ROOT NAME WORD... [--block RANK STEP CALL] [--no-flock]

A WORD is a step to be saved, or `wait`: ROOT.NAME.ready is made, and ROOT.NAME.go awaited. With `--block` the rank does
the same before that call ("open", "fsync", "rename") on its file of that step. With `--no-flock` the filesystem knows
no locks. An error of the engine is printed on every rank; the status is 3 then.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from mpi_ckpt import Checkpointer, CheckpointError
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions, leave_together
from tests.programs.faults import Operation, watched
from tests.programs.states import state

comm = MPI.COMM_WORLD


def wait(root: Path, name: str) -> None:
    root.with_name(f"{root.name}.{name}.ready").touch()
    while not root.with_name(f"{root.name}.{name}.go").exists():
        time.sleep(0.01)


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def run(arguments: argparse.Namespace) -> None:
    with Checkpointer(arguments.root, comm, keep=2, async_io=False) as ckpt:
        for word in arguments.words:
            if word == "wait":
                comm.rank or wait(arguments.root, arguments.name)
                comm.Barrier()
            else:
                ckpt.save(int(word), state(comm.rank, comm.size, int(word), arguments.name))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("name")
    parser.add_argument("words", nargs="+")
    parser.add_argument("--block", nargs=3, default=(-1, -1, ""))
    parser.add_argument("--no-flock", action="store_true")
    arguments = parser.parse_args()
    abort_on_uncaught_exceptions(comm)
    if arguments.no_flock:
        fcntl.flock = no_locks
    rank, step, call = arguments.block
    files = f"step_{int(step):08d}/rank"

    @contextlib.contextmanager
    def block(operation: Operation) -> Iterator[None]:
        if comm.rank == int(rank) and operation.call == call and operation.path.startswith(files):
            wait(arguments.root, arguments.name)
        yield

    try:
        with watched(arguments.root, block):
            run(arguments)
    except CheckpointError as error:
        sys.stdout.write(f"[rank {comm.rank}] {type(error).__name__}: {error}\n")  # one write: lines must not mix
        leave_together(comm, 3)


if __name__ == "__main__":
    main()
