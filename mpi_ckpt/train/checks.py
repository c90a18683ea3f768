"""What the program checks of itself; each failure is an error with a non-zero exit."""

from __future__ import annotations

import resource
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpi_ckpt.comm.collectives import gather_rows
from mpi_ckpt.errors import ExplainedError
from mpi_ckpt.parallel.zero import ZeroOptimizer

if TYPE_CHECKING:
    from mpi4py import MPI

_WINDOW = 5  # losses at either end that are compared


class CheckFailed(ExplainedError):
    """The program found itself wrong: its results are not to be trusted."""


def check_replicas(comm: MPI.Comm, step: int, param_norm: float) -> None:
    """**Collective.** Raise CheckFailed unless the parameter norm is the same on all ranks, to the bit."""
    bits = [struct.pack("d", norm) for norm in gather_rows(comm, [param_norm])[:, 0]]
    for rank, other in enumerate(bits):
        if other != bits[0]:
            raise CheckFailed(
                f"the parameters differ between ranks after step {step}",
                rank=rank,
                found=f"parameter norm {struct.unpack('d', other)[0].hex()} on rank {rank}",
                expected=f"{struct.unpack('d', bits[0])[0].hex()}, as on rank 0",
                action="Suspect memory, network or MPI library of that rank's node; resume from the last checkpoint.",
            )


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


def resident_bytes() -> int:
    """**Local.** The largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
