"""Who owns what when tensor ranks share a model: each element of the whole has one owner, on all the mesh.

What is shared (embeddings, layer norms, the biases of row-split layers) all tensor ranks hold and update alike, and
tensor rank 0 owns: its values count in norms, are the ones in checkpoints, and are given to the others where they could
come to differ. One owner is the simplest rule that gives each element one, and in a large model little is shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpi_ckpt.layout import Shard
from mpi_ckpt.parallel.aligned import aligned_zeros
from mpi_ckpt.parallel.norm import squared_norm
from mpi_ckpt.parallel.tensor import merged

if TYPE_CHECKING:
    from mpi_ckpt.parallel.tensor import LocalPart, TensorGroup


class OwnedPieces:
    """What this rank owns, and what it shares, of the interval [start, stop) of its local vector.

    `mine` in the methods is an array over that interval: [stop - start].
    """

    def __init__(self, tensor: TensorGroup, part: LocalPart, start: int, stop: int) -> None:
        pieces = part.within(start, stop)
        self._tensor, self._whole_numel = tensor, part.numel
        self._owned = merged(p for p in pieces if tensor.rank == 0 or not p.shared)
        shared = [p for p in pieces if p.shared and tensor.size > 1]
        self._shared = [slice(p.local, p.local + p.size) for p in shared]
        self._packed = aligned_zeros(sum(p.size for p in shared), np.float32)

    def shards(self, mine: np.ndarray) -> Shard | list[Shard]:
        """**Local.** What I own of `mine`, in the flat space of the whole model: views; several unless it is one."""
        found = [Shard(mine[p.local : p.local + p.size], p.whole, self._whole_numel) for p in self._owned]
        if len(found) > 1:
            return found
        return found[0] if found else Shard(mine[:0], 0, self._whole_numel)

    def squared_norm(self, mine: np.ndarray, scratch: np.ndarray) -> float:
        """**Local.** Sum of the squares of what I own, see `norm.squared_norm`.

        What another rank owns adds zero times its squares: nothing, unless it is not finite here alone.
        """
        owned = [squared_norm(mine[p.local : p.local + p.size], scratch) for p in self._owned]
        others = [squared_norm(mine[piece], scratch) for piece in self._shared] if self._tensor.rank else []
        return sum(owned) + 0.0 * sum(others)

    def take_shared(self, mine: np.ndarray) -> None:
        """**Collective.** In place: what is shared of `mine`, float16 or float32, becomes as its owner has it."""
        if self._tensor.size == 1:
            return
        packed = self._packed.view(mine.dtype)[: self._packed.size]  # one message instead of one a piece
        places, filled = [], 0
        for piece in self._shared:
            places.append(packed[filled : filled + piece.stop - piece.start])
            filled += piece.stop - piece.start
        for place, piece in zip(places, self._shared, strict=True):
            np.copyto(place, mine[piece])
        self._tensor.broadcast(packed)
        for place, piece in zip(places, self._shared, strict=True):
            np.copyto(mine[piece], place)
