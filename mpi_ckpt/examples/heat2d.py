"""A hot disc on a cold plate: the 2-d heat equation on a grid of ranks, continued on any other grid of ranks.

    mpirun -n 4 python -m mpi_ckpt.examples.heat2d --run-dir runs/heat              # 2 x 2 blocks; kill it at any time
    mpirun -n 3 python -m mpi_ckpt.examples.heat2d --run-dir runs/heat --elastic    # goes on with 3 x 1, to the bit

A rank holds `padded`, float64: its block of the plate in a frame of *ghost cells*, copies of its neighbours' outermost
cells. It owns the inside, `padded[1:-1, 1:-1]`, and this strided view is what a checkpoint saves. A cell's arithmetic
is the same wherever the blocks are cut, so the field does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpi_ckpt import Checkpointer, LayoutMismatch, Shard, shard_range
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions, leave_together
from mpi_ckpt.errors import ExplainedError

ALPHA = 1.11e-4  # m^2/s, thermal diffusivity of copper
H = 1e-3  # m, edge of a square cell
# FTCS in 2-d is stable for R = ALPHA DT / H^2 <= 1/4 (von Neumann analysis: LeVeque, SIAM 2007, sections 9.6 and 9.7).
R = 0.2
DT = R * H**2 / ALPHA  # s, a step
HOT = 100.0  # degrees Celsius of the disc; the plate, and for ever its edges, are at 0


def advance(padded: np.ndarray) -> None:
    """**Local.** One step of the block inside `padded`, whose ghost cells are those of this time; in place.

    du/dt = ALPHA (d2u/dx2 + d2u/dy2), forward in time and centred in space (FTCS, the 5-point stencil):
    u'[i, j] = u[i, j] + R (u[i-1, j] + u[i+1, j] + u[i, j-1] + u[i, j+1] - 4 u[i, j])
    """
    field = padded[1:-1, 1:-1]
    north, south, west, east = padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:]
    field += R * (north + south + west + east - 4 * field)


def exchange(cart: MPI.Cartcomm, padded: np.ndarray) -> None:
    """**Collective.** Fill the ghost cells. Beyond the plate is MPI.PROC_NULL: there they stay what they are, 0."""
    (north, south), (west, east) = cart.Shift(0, 1), cart.Shift(1, 1)
    cart.Sendrecv(padded[1], dest=north, recvbuf=padded[-1], source=south)
    cart.Sendrecv(padded[-2], dest=south, recvbuf=padded[0], source=north)
    # a column is one cell of each row, described from its top cell on: MPI gathers it, no copy of ours
    column = MPI.DOUBLE.Create_vector(padded.shape[0], 1, padded.shape[1]).Commit()
    cart.Sendrecv([padded[0, 1:], 1, column], dest=west, recvbuf=[padded[0, -1:], 1, column], source=east)
    cart.Sendrecv([padded[0, -2:], 1, column], dest=east, recvbuf=[padded[0], 1, column], source=west)
    column.Free()


def initial_block(cart: MPI.Cartcomm, shape: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """**Local.** This rank's padded block of the plate, float64, and the global index of the first cell it owns."""
    if any(n < ranks for n, ranks in zip(shape, cart.dims, strict=True)):
        found = f"{cart.dims[0]} x {cart.dims[1]} ranks for {shape[0]} x {shape[1]} cells"
        raise LayoutMismatch("more ranks than cells along an axis", found=found, action="Start fewer: each needs one.")
    (top, bottom), (left, right) = (shard_range(*each) for each in zip(shape, cart.dims, cart.coords, strict=True))
    padded = np.zeros((bottom - top + 2, right - left + 2))
    y, x = np.ogrid[top:bottom, left:right]
    padded[1:-1, 1:-1] = HOT * ((y - shape[0] // 2) ** 2 + (x - shape[1] // 3) ** 2 < (0.3 * min(shape)) ** 2)
    return padded, (top, left)


def report(cart: MPI.Cartcomm, step: int, seconds: float, field: np.ndarray) -> None:
    """**Collective.** A line of what the plate is like, of the blocks in rank order; heat is the sum over the cells."""
    blocks = cart.gather((float(field.sum()), field.min(), field.max()))
    if blocks is not None:
        heat, low, high = zip(*blocks, strict=True)
        print(f"step {step}, {seconds:.4f} s: heat {sum(heat):.6g}, {min(low):.4g} to {max(high):.4g}", flush=True)


def solve(comm: MPI.Intracomm, args: argparse.Namespace) -> None:
    """**Collective.** All steps that are still to be done. Raises a CheckpointError, the same on every rank."""
    cart = comm.Create_cart(MPI.Compute_dims(comm.size, 2), reorder=True)
    padded, start = initial_block(cart, args.shape)
    field = padded[1:-1, 1:-1]
    state: dict[str, Any] = {"u": Shard(field, start, args.shape), "seconds": 0.0}
    with Checkpointer(args.run_dir / "checkpoints", cart, every=args.every) as checkpointer:
        found = checkpointer.restore(state, world_size="any" if args.elastic else "same")
        first = found.step + 1 if found else 1
        if cart.rank == 0:
            grid = f"{cart.dims[0]} x {cart.dims[1]} ranks"
            print(
                f"from step {first - 1} on {grid}" if first <= args.steps else "all steps are done already", flush=True
            )
        for step in range(first, args.steps + 1):
            exchange(cart, padded)
            advance(padded)
            state["seconds"] += DT
            if not checkpointer.save_if_due(step, state) and step == args.steps:
                checkpointer.save(step, state)
            if step % max(1, args.steps // 8) == 0:
                report(cart, step, state["seconds"], field)


def parse(speaks: bool) -> argparse.Namespace:
    """**Local.** The options; every rank reads the same line, and one of them says what is wrong with it."""
    parser = argparse.ArgumentParser(prog="heat2d", description="A hot disc on a cold plate, on any number of ranks.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's directory")
    parser.add_argument("--shape", type=shape, default=(203, 117), metavar="ROWS,COLUMNS", help="cells (203,117)")
    parser.add_argument("--steps", type=positive, default=400, help="steps of the whole run (default 400)")
    parser.add_argument("--every", default="50steps", help="when to save: 50steps, 10min (default 50steps)")
    parser.add_argument("--elastic", action="store_true", help="continue on another number of ranks")
    with contextlib.redirect_stderr(sys.stderr if speaks else io.StringIO()):
        return parser.parse_args()


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer of at least 1")
    return int(text)


def shape(text: str) -> tuple[int, int]:
    rows, comma, columns = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected two integers, as 203,117")
    return positive(rows), positive(columns)


def main() -> None:
    """**Collective.** Run and leave: status 0, 2 for bad usage, 1 for any other failure."""
    comm = MPI.COMM_WORLD
    abort_on_uncaught_exceptions(comm)
    try:
        solve(comm, parse(speaks=comm.rank == 0))
    except (ExplainedError, ValueError) as error:
        sys.stderr.write(f"[rank {comm.rank}] error: {error}\n")  # one write: lines of ranks must not mix
        leave_together(comm, 1)


if __name__ == "__main__":
    main()
