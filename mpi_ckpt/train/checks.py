"""What the program checks of itself; each failure is an error with a non-zero exit."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpi_ckpt.comm.collectives import gather_rows
from mpi_ckpt.errors import ExplainedError
from mpi_ckpt.parallel.zero import ZeroOptimizer

if TYPE_CHECKING:
    from mpi4py import MPI

_WINDOW = 5  # losses at either end that are compared


class CheckFailed(ExplainedError):
    """The program found itself wrong: its results are not to be trusted."""


class Boundary(NamedTuple):
    """What all ranks know of each other at the end of a step."""

    request: int  # to leave: the first rank's that was asked to, see `preemption.REASONS`
    finite: bool  # the parameters of all ranks are


def check_replicas(comm: MPI.Comm, step: int, param_norm: float, request: int = 0, part: int = 0) -> Boundary:
    """**Collective.** One small message at the end of a step: are the replicas equal, was any rank asked to leave?

    `param_norm` is compared to the bit with those of the ranks of the same `part` of the model (a tensor rank), unless
    one is not finite. Raises CheckFailed when two differ.
    """
    rows = gather_rows(comm, [param_norm, request, part])
    norms, requests, parts = rows.T.tolist()
    boundary = Boundary(next((int(r) for r in requests if r), 0), all(map(math.isfinite, norms)))
    for rank in range(comm.size if boundary.finite else 0):
        first = parts.index(parts[rank])
        if norms[rank] != norms[first]:  # finite and above 0: equal means equal bits
            raise CheckFailed(
                f"the parameters differ between ranks after step {step}",
                rank=rank,
                found=f"parameter norm {norms[rank].hex()} on rank {rank}",
                expected=f"{norms[first].hex()}, as on rank {first}",
                action="Suspect memory, network or MPI library of that rank's node; resume from the last checkpoint.",
            )
    return boundary


def check_optimizer_bytes(optimizer: ZeroOptimizer, rank: int) -> None:
    """**Local.** Raise CheckFailed unless the optimizer state is 12 bytes a parameter of this rank's shard."""
    expected = 12 * (optimizer.stop - optimizer.start)
    if optimizer.optimizer_bytes != expected:
        raise CheckFailed(
            "the optimizer state is not sharded as it must be",
            rank=rank,
            found=f"{optimizer.optimizer_bytes} bytes",
            expected=f"{expected} bytes: fp32 master, m and v of {optimizer.stop - optimizer.start} parameters",
        )


def check_loss_falls(losses: Sequence[float]) -> None:
    """**Local.** Raise CheckFailed unless the mean of the last losses is below that of the first ones."""
    first, last = sum(losses[:_WINDOW]) / _WINDOW, sum(losses[-_WINDOW:]) / _WINDOW
    if not last < first:
        raise CheckFailed(
            f"the loss does not fall over {len(losses)} steps",
            found=f"mean of the last {_WINDOW} losses {last:.4f}",
            expected=f"below the mean of the first {_WINDOW}, {first:.4f}",
        )


MEMORY = ("params", "gradients", "optimizer", "resident")


def gather_memory(comm: MPI.Comm, optimizer: ZeroOptimizer) -> list[list[float]]:
    """**Collective.** Bytes of each rank, [ranks, 4], by the names of MEMORY."""
    mine = optimizer.params.nbytes, optimizer.grads.nbytes, optimizer.optimizer_bytes, resident_bytes()
    rows: list[list[float]] = gather_rows(comm, mine).tolist()
    return rows


def memory_by_name(rows: list[list[float]]) -> dict[str, list[int]]:
    """**Local.** The same for the metrics: under each name a list by rank."""
    return {name: [int(row[i]) for row in rows] for i, name in enumerate(MEMORY)}


def resident_bytes() -> int:
    """**Local.** The largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
