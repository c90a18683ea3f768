"""Saves as a scenario says, and dies on the way.

    python -m tests.programs.crash DIRECTORY SCENARIO... [--sync] [--kill RANK before|after NUMBER] [--images]

For each scenario the checkpoints root is DIRECTORY/<scenario>. What each rank does to its files goes line by line to
DIRECTORY/<scenario>.ops/<rank>. `--kill` sends the rank SIGKILL at its durable operation NUMBER (from 0). `--images`
keeps in DIRECTORY/<scenario>.images what a kill of all ranks, or a power cut, would leave after every single change.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from mpi_ckpt import Checkpointer
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions
from tests.programs.faults import DURABLE, Operation, watched
from tests.programs.images import Camera
from tests.programs.states import blank, state

comm = MPI.COMM_WORLD


def base(ckpt: Checkpointer) -> None:
    """Two steps for others to start from."""
    for step in (1, 2):
        save(ckpt, step, "old")


def first(ckpt: Checkpointer) -> None:
    save(ckpt, 1, "new")


def rotation(ckpt: Checkpointer) -> None:
    """After steps 1 and 2, with keep=2."""
    assert ckpt.restore(blank(comm.rank, comm.size)).step == 2
    save(ckpt, 3, "new")


def overwrite(ckpt: Checkpointer) -> None:
    """Back to step 1, and step 2 once more."""
    assert ckpt.restore(blank(comm.rank, comm.size), step=1).step == 1
    save(ckpt, 2, "new", overwrite=True)


def save(ckpt: Checkpointer, step: int, tag: str, **options: bool) -> None:
    ckpt.save(step, state(comm.rank, comm.size, step, tag), **options)
    for _ in range(20):  # the application goes on
        comm.allreduce(step)


class Journal:
    """Writes down every operation, and kills this process at one of them."""

    def __init__(self, directory: Path, kill: tuple[str, int] | None) -> None:
        directory.mkdir(exist_ok=True)
        self._file = os.open(directory / str(comm.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._kill = kill
        self._durable = -1

    @contextlib.contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        self._durable += operation.call in DURABLE
        self._note("before", operation)
        yield
        self._note("after", operation)

    def _note(self, when: str, operation: Operation) -> None:
        if operation.call in DURABLE and self._kill == (when, self._durable):
            os.write(self._file, f"killed {when} {operation}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(self._file, f"{when} {operation}\n".encode())


@contextlib.contextmanager
def observed(root: Path, arguments: argparse.Namespace) -> Iterator[None]:
    """The journal, and the camera if it is wanted."""
    kill = None
    if arguments.kill and int(arguments.kill[0]) == comm.rank:
        kill = arguments.kill[1], int(arguments.kill[2])
    journal = Journal(root.with_name(root.name + ".ops"), kill)
    with contextlib.ExitStack() as stack:
        if arguments.images:
            camera = Camera(root, comm.rank)
            stack.enter_context(watched(root, camera, cut=True))
        stack.enter_context(watched(root, journal))
        yield
        comm.Barrier()
        if arguments.images and comm.rank == 0:
            camera.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("scenarios", nargs="+")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--kill", nargs=3)
    arguments = parser.parse_args()
    abort_on_uncaught_exceptions(comm)
    with open("/proc/self/maps") as maps:  # a killed MPICH job leaves its shared memory behind: tell whose it is
        shared = {line.split()[5] for line in maps if "/dev/shm/mpich_shm" in line}
    (arguments.directory / f"shared.{comm.rank}").write_text("\n".join(shared))
    for name in arguments.scenarios:
        root = arguments.directory / name
        with observed(root, arguments), Checkpointer(root, comm, keep=2, async_io=not arguments.sync) as ckpt:
            globals()[name](ckpt)


if __name__ == "__main__":
    main()
