"""ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054): every rank holds all parameters and updates its own shard.

The optimizer state of P parameters (fp32 master, m and v: 12 bytes a parameter) is spread over the ranks in intervals
of the flat parameter space. A step is: Reduce_scatter of the gradients, a small gather of sums, AdamW on my shard,
Allgather of the parameters.

On a data x tensor mesh all this happens among the ranks that hold the same part of the model, on the flat vector of
that part. What tensor ranks share each of them updates for itself, from the gradients of the one that owns it (see
`owned`): neither the MPI library's order of additions nor an unlike processor can let the copies drift apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from mpi_ckpt.comm.collectives import (
    allgather_intervals,
    broadcast,
    gather_rows,
    reduce_scatter_sum,
    sum_in_rank_order,
)
from mpi_ckpt.layout import Shard, shard_range
from mpi_ckpt.parallel.adamw import AdamWOptions, Intervals, Scratch, adamw_update, intervals_within
from mpi_ckpt.parallel.aligned import aligned_zeros
from mpi_ckpt.parallel.buckets import OverlappedReduction
from mpi_ckpt.parallel.norm import NORM_BLOCK, squared_norm
from mpi_ckpt.parallel.owned import OwnedPieces
from mpi_ckpt.parallel.tensor import LocalPart, TensorGroup

if TYPE_CHECKING:
    from mpi4py import MPI


class GradientSummary(NamedTuple):
    """What all ranks know of a step's gradient before it is applied; the same bits on every rank."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float  # Euclidean norm of the mean gradient; not finite if any element is not
    tokens: float  # in the global batch


class StepResult(NamedTuple):
    """What a step reports. `loss` and `grad_norm` are the same bits on every rank by construction."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float  # Euclidean norm of the mean gradient
    param_norm: float  # of this rank's replica after the step: equal replicas have it equal to the bit
    lr: float  # the learning rate as used


class ZeroOptimizer:
    """**Collective.** AdamW whose state is sharded over `comm`; every rank passes the same arguments.

    `initial` float32 [P] holds the initial parameters; only rank 0's values count, they are broadcast once. Parameters
    are kept as `param_dtype` (float16 or float32). `decay_intervals` are the sorted, disjoint intervals of the flat
    parameter space that decay; None: all. Raises ValueError, on every rank, when `initial` differs in length between
    ranks or is not flat float32, or when an option is out of its range.

    Of a model that `tensor` ranks share, `comm` has the ranks with the same part, P is that part's length, and `part`
    says where it lies in the whole. `overlap` sums gradients as `gradients_ready` hears of them; last bits may differ.

    Attributes: `params` [P] and `grads` float32 [P], both 64-byte aligned; `start`, `stop`: my interval; `master`,
    `m`, `v` float32 [stop - start]; `steps_taken`: updates so far, AdamW's bias correction counts them.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        initial: np.ndarray,
        *,
        param_dtype: DTypeLike = np.float16,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        decay_intervals: Intervals | None = None,
        tensor: TensorGroup | None = None,
        part: LocalPart | None = None,
        overlap: bool = False,
    ) -> None:
        numel = _agreed_length(comm, initial)
        part = part or LocalPart.all_of(numel)
        if part.size != numel:
            raise ValueError(f"part: found pieces of {part.size} elements; expected {numel}, as in `initial`")
        self._comm, self._tensor = comm, tensor or TensorGroup()
        self._watch = self._tensor.watch  # of all communication, the model's included
        self._options = AdamWOptions(*betas, eps, weight_decay)
        self._counts = [stop - start for start, stop in (shard_range(numel, comm.size, r) for r in range(comm.size))]
        self.start, self.stop = shard_range(numel, comm.size, comm.rank)
        self._decay_intervals = _cut(decay_intervals, numel, self.start, self.stop)

        self.params = aligned_zeros(numel, _checked_param_dtype(param_dtype))
        self.grads = aligned_zeros(numel, np.float32)
        self.master, self.m, self.v, self._mine = (aligned_zeros(self.stop - self.start, np.float32) for _ in range(4))
        self.steps_taken = 0
        self._owned = OwnedPieces(self._tensor, part, self.start, self.stop)
        self._reduction = OverlappedReduction(comm, self.grads, self._counts, self._mine) if overlap else None
        self._scratch = Scratch()
        self._wide = aligned_zeros(NORM_BLOCK, np.float64)
        self._receive_initial(initial)

    def _receive_initial(self, initial: np.ndarray) -> None:
        """The gradient buffer is free before the first step: the fp32 parameters arrive there."""
        if self._comm.rank == 0:
            np.copyto(self.grads, initial)
        broadcast(self._comm, self.grads)
        np.copyto(self.master, self.grads[self.start : self.stop])
        np.copyto(self.params, self.grads, casting="unsafe")
        self.grads.fill(0)

    def step(self, lr: float, local_tokens: int, local_loss_sum: float) -> StepResult:
        """**Collective.** One update from the gradients that the ranks have put into `grads`.

        `grads` holds the *sum* of the gradients of this rank's `local_tokens` tokens and `local_loss_sum` the sum of
        their losses; the means are taken over the tokens of all ranks, however these share them (none is fine).
        `grads` is read and left as it is: the caller overwrites or clears it. `lr` is the learning rate of this step.
        Raises ValueError, on every rank, when the ranks count no tokens.
        """
        gradient = self.reduce_gradients(local_tokens, local_loss_sum)
        self.apply(lr, 1.0 / gradient.tokens)
        return StepResult(gradient.loss, gradient.grad_norm, self.replica_norm(), lr)

    def reduce_gradients(self, local_tokens: int, local_loss_sum: float) -> GradientSummary:
        """**Collective.** The first half of a step: sum the gradients into the shards; no state changes.

        Norm and loss come from float64 sums in rank order. See `step` for the arguments and for what is raised.
        """
        with self._watch:
            if self._reduction:
                self._reduction.finish()
            else:
                reduce_scatter_sum(self._comm, self.grads, self._counts, self._mine)
        mine = (local_loss_sum, local_tokens, self._owned.squared_norm(self._mine, self._wide))
        with self._watch:
            rows = gather_rows(self._comm, mine)
            loss_sum, tokens, squares = self._over_tensor_ranks(*sum_in_rank_order(rows).tolist())
            self._owned.take_shared(self._mine)
        if not (tokens > 0 and (rows[:, 1] >= 0).all()):
            raise ValueError(f"tokens of each rank: found {rows[:, 1].tolist()}; expected none negative, some positive")
        return GradientSummary(loss_sum / tokens, math.sqrt(squares) / tokens, tokens)

    def gradients_ready(self, start: int, stop: int) -> None:
        """**Collective.** With `overlap`: `grads[start:stop]` is final until the next step, its sum may begin.

        Called in a step's last backward, from the last interval to the first; `reduce_gradients` sums what is left.
        """
        if self._reduction:
            with self._watch:
                self._reduction.ready(start, stop)

    def _over_tensor_ranks(self, loss_sum: float, tokens: float, squares: float) -> list[float]:
        """**Collective.** Sums over the whole mesh: tensor ranks see the same tokens, and those of rank 0 count."""
        if self._tensor.size == 1:
            return [loss_sum, tokens, squares]
        once = float(self._tensor.rank == 0)  # a NaN that only this rank has stays NaN
        return sum_in_rank_order(self._tensor.gather_rows([once * loss_sum, once * tokens, squares])).tolist()

    def apply(self, lr: float, grad_scale: float) -> None:
        """**Collective.** The second half of a step: AdamW on my shard, then all parameters to all ranks.

        The summed gradient is multiplied by `grad_scale` in float32: 1 / tokens (in float64, rounded once) for the
        mean, times a factor for clipping.
        """
        self.steps_taken += 1
        adamw_update(
            self.master,
            self.m,
            self.v,
            self._mine,
            self.params[self.start : self.stop],
            self._options,
            self._scratch,
            lr=lr,
            step=self.steps_taken,
            grad_scale=grad_scale,
            decay_intervals=self._decay_intervals,
        )
        self.gather_parameters()

    def gather_parameters(self) -> None:
        """**Collective.** Every rank's interval of `params` to all ranks that hold the same part of the model."""
        with self._watch:
            allgather_intervals(self._comm, self.params, self._counts)

    def restored(self, steps_taken: int) -> None:
        """**Collective.** Complete a state that was restored into `state()`, which had taken `steps_taken` updates.

        A checkpoint holds every element once: what is shared has come to tensor rank 0 alone.
        """
        for mine in (self.params[self.start : self.stop], self.master, self.m, self.v):
            self._owned.take_shared(mine)
        self.steps_taken = steps_taken
        self.gather_parameters()

    def replica_norm(self) -> float:
        """**Local.** Euclidean norm of this rank's whole replica; its bits depend on the parameters alone."""
        return math.sqrt(squared_norm(self.params, self._wide))

    def state(self) -> dict[str, Shard | list[Shard]]:
        """**Local.** What I own of `param`, `master`, `m` and `v`, each over the flat space of the whole model.

        Live views, to be restored in place; call `restored` after that. A tensor rank's interval is several shards.
        """
        arrays = {"param": self.params[self.start : self.stop], "master": self.master, "m": self.m, "v": self.v}
        return {name: self._owned.shards(array) for name, array in arrays.items()}

    @property
    def communication_seconds(self) -> float:
        """Seconds that this rank has spent in collectives, waiting included, those of its `tensor` group among them."""
        return self._watch.seconds

    @property
    def optimizer_bytes(self) -> int:
        """Memory of my shard of the optimizer state, measured from the arrays."""
        return self.master.nbytes + self.m.nbytes + self.v.nbytes


def _agreed_length(comm: MPI.Comm, initial: np.ndarray) -> int:
    """**Collective.** P. A rank with a bad array says so in the gather, so that no rank waits for it in vain."""
    good = initial.ndim == 1 and initial.dtype == np.float32
    lengths = gather_rows(comm, [initial.size if good else -1])[:, 0].astype(int).tolist()
    if min(lengths) < 0 or len(set(lengths)) > 1:
        raise ValueError(
            f"initial: found lengths {lengths} by rank (-1: not a flat float32 array); "
            "expected a flat float32 array of the same length on every rank"
        )
    return lengths[0]


def _checked_param_dtype(dtype: DTypeLike) -> np.dtype:
    if np.dtype(dtype) not in (np.float16, np.float32):
        raise ValueError(f"param_dtype: found {np.dtype(dtype)}; expected float16 or float32")
    return np.dtype(dtype)


def _cut(decay_intervals: Intervals | None, numel: int, start: int, stop: int) -> Intervals | None:
    """The part of the decaying intervals that lies in my interval, counted from its start."""
    if decay_intervals is None:
        return None
    bounds = [0, *(bound for interval in decay_intervals for bound in interval), numel]
    if bounds != sorted(bounds):
        raise ValueError(
            f"decay_intervals: found {list(decay_intervals)}; expected sorted and disjoint in [0, {numel})"
        )
    return list(intervals_within(decay_intervals, start, stop))
