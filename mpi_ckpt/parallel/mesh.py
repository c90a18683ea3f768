"""A data x tensor mesh of ranks (Megatron-LM, arXiv:1909.08053, section 3; the figure of ranks is its appendix B.1).

Tensor ranks are neighbours, rank = data_index * T + tensor_index: they talk in every layer, so they belong on one node.

    T = 2, 6 ranks       tensor 0   tensor 1
         data 0              0          1        the ranks of a row share one model and see the same samples
         data 1              2          3        the ranks of a column hold the same parameters and split the batch
         data 2              4          5
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi_ckpt.errors import ExplainedError, WorldSizeMismatch
from mpi_ckpt.parallel.tensor import TensorGroup

if TYPE_CHECKING:
    from mpi4py import MPI


class MeshError(ExplainedError, ValueError):
    """The ranks, or the model, cannot be split as was asked for."""


class Mesh:
    """**Collective.** The ranks of `comm` as rows of `tensor_ranks` neighbours; all ranks pass the same number.

    `data`: the communicator of my column, whose ranks are data indices; `tensor`: my row. With one tensor rank, `data`
    is `comm` itself. Raises MeshError, on every rank, unless `tensor_ranks` divides the number of ranks.
    """

    def __init__(self, comm: MPI.Comm, tensor_ranks: int = 1) -> None:
        if tensor_ranks < 1 or comm.size % tensor_ranks:
            raise MeshError(
                f"{comm.size} ranks cannot be split into groups of {tensor_ranks} tensor ranks",
                found=f"tensor_parallel {tensor_ranks} on {comm.size} ranks",
                expected=f"a divisor of {comm.size}",
                action="Run on a multiple of --tensor-parallel ranks, or give another --tensor-parallel.",
            )
        self.world = comm
        row, column = divmod(comm.rank, tensor_ranks)
        alone = tensor_ranks == 1
        self.data: MPI.Comm = comm if alone else comm.Split(column, comm.rank)
        self.tensor = TensorGroup(None if alone else comm.Split(row, comm.rank))

    @property
    def shape(self) -> dict[str, int]:
        """How many ranks there are along each axis: what a checkpoint's meta says."""
        return {"data": self.data.size, "tensor": self.tensor.size}

    def check_model(self, n_head: int) -> None:
        """**Local.** Raise MeshError, on every rank, unless a model of `n_head` heads can be split over a row."""
        if n_head % self.tensor.size:
            raise MeshError(
                "the attention heads cannot be dealt evenly to the tensor ranks",
                found=f"n_head {n_head}, tensor_parallel {self.tensor.size}",
                expected=f"a --tensor-parallel that divides {n_head}",
                action="Give another --tensor-parallel; for a new run, another --n-head will do, too.",
            )

    def check_saved(self, shape: dict[str, int]) -> None:
        """**Local.** Raise WorldSizeMismatch, on every rank, unless `shape` of a checkpoint's mesh is this one's."""
        if shape != self.shape:
            raise WorldSizeMismatch(
                "the checkpoint was saved by another mesh of ranks",
                found=f"{shape['data']} data x {shape['tensor']} tensor ranks in the checkpoint",
                expected=f"{self.data.size} data x {self.tensor.size} tensor ranks, as are running",
                action=f"Run with --tensor-parallel {shape['tensor']}, or ask for resharding: --elastic.",
            )

    def close(self) -> None:
        """**Collective.** Free the communicators that were made here."""
        if self.tensor.size > 1:
            self.data.Free()
        self.tensor.close()
