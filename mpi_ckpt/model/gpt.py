"""MiniGPT: a pre-LayerNorm transformer decoder in NumPy, forward and backward by hand.

    x = wte[tokens] + wpe
    for each block:   x += attention(layer_norm(x));   x += mlp(layer_norm(x))
    loss = cross_entropy(layer_norm(x) head^T, targets)

Ranks may share the model (tensor parallelism, arXiv:1909.08053, figure 3): each has some of the heads and hidden units
of every block, and they add up twice a block in each direction: in `add_projection` and in `linear_backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from mpi_ckpt.model.activations import Activations
from mpi_ckpt.model.attention import causal_attention, causal_attention_backward
from mpi_ckpt.model.config import ModelConfig
from mpi_ckpt.model.half import cast_up
from mpi_ckpt.model.layers import (
    Allreduce,
    add_projection,
    add_projection_backward,
    embed,
    embed_backward,
    gelu,
    layer_norm,
    layer_norm_backward,
    linear,
    linear_backward,
)
from mpi_ckpt.model.parameters import Parameters, RememberedViews, initial_parameters
from mpi_ckpt.model.softmax import cross_entropy, cross_entropy_backward
from mpi_ckpt.model.split import ALONE, Part, TensorRanks, parts_of
from mpi_ckpt.model.workspace import Workspace, aligned_zeros

Ready = Callable[[int, int], None]  # told (start, stop) of the flat vector once that part of the gradient is final


class MiniGPT:
    """The model of `config` with memory for up to `batch` sequences; it holds no parameters. For one thread at a time.

    `dtype` is that of all arithmetic and of the gradients: float32, or float64 to see what rounding does to a result.
    `tensor` are the ranks that share the model. P is the length of this rank's flat vector, which `parts` describes;
    alone it is the whole model's. All these ranks call the same methods with the same tokens, and get the same loss.
    All arrays are allocated here; a call allocates nothing that grows with the model, except that the first one with
    `accumulate` adds a vector of P.
    """

    def __init__(
        self, config: ModelConfig, batch: int, dtype: DTypeLike = np.float32, tensor: TensorRanks = ALONE
    ) -> None:
        if not isinstance(batch, int) or batch < 0:
            raise ValueError(f"batch: found {batch!r}, expected an integer of at least 0")
        self.config, self.batch, self.dtype = config, batch, np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"dtype: found {self.dtype}, expected float32 or float64")
        self.tensor = tensor
        self.parts = parts_of(config, tensor.rank, tensor.size)
        self._sections = _sections(self.parts)
        self._space = Workspace(self.dtype)
        self._activations = {batch: Activations.take(self._space, batch, config, tensor.size)}
        self._cast = aligned_zeros((self.parts[-1].stop,), self.dtype)
        self._addend: np.ndarray | None = None
        self._parameter_views, self._gradient_views = RememberedViews(self.parts), RememberedViews(self.parts)

    def initial_parameters(self, seed: int) -> np.ndarray:
        """[P] float32 as GPT-2 begins: this rank's parts of a pure function of the config and the seed."""
        return initial_parameters(self.parts, seed)

    @np.errstate(all="ignore")
    def loss(self, params: np.ndarray, tokens: ArrayLike, targets: ArrayLike) -> float:
        """The sum over tokens of the cross entropy, in nats: forward only. Arguments as in `loss_and_gradients`."""
        views = self._cast_and_view(params)
        acts = self._load(tokens, targets)
        return forward(views, acts, self.tensor.allreduce) if acts.x.size else 0.0

    @np.errstate(all="ignore")
    def loss_and_gradients(
        self,
        params: np.ndarray,
        tokens: ArrayLike,
        targets: ArrayLike,
        grads: np.ndarray,
        accumulate: bool = False,
        on_gradients_ready: Ready | None = None,
    ) -> float:
        """The loss as `loss` returns it, and its gradient in `grads`: of the SUM over tokens, not of their mean.

        `params` [P] float16 or float32 (with `dtype` float64 also float64); `tokens` and `targets` [b, T] integers
        below the vocabulary's size, 0 <= b <= `batch`; `grads` [P] of the model's `dtype`, overwritten, or added to
        with `accumulate`. NaN and infinity in the parameters come out as such, without a warning. Raises ValueError
        for another shape, dtype or token id, and then leaves `grads` as it was.

        `on_gradients_ready(start, stop)` is called as soon as that interval of `grads` is final: from the last to the
        first, one for each block and one at either end, the same on every rank, also without sequences.
        """
        views = self._cast_and_view(params)
        self._check_vector("grads", grads, (self.dtype,))
        acts = self._load(tokens, targets)
        into, ready = grads, on_gradients_ready or _tell_nobody
        if not acts.x.size:
            if not accumulate:
                grads.fill(0.0)
            for start, stop in reversed(self._sections):
                ready(start, stop)
            return 0.0
        if accumulate:
            if self._addend is None:
                self._addend = aligned_zeros(grads.shape, self.dtype)
            into = self._addend

        def finish(section: int) -> None:
            start, stop = self._sections[section]
            if accumulate:
                np.add(grads[start:stop], into[start:stop], grads[start:stop])
            ready(start, stop)

        loss = forward(views, acts, self.tensor.allreduce)
        backward(views, acts, self._gradient_views.of(into), self.tensor.allreduce, finish)
        return loss

    def _cast_and_view(self, params: np.ndarray) -> Parameters:
        """Views of `params` in the model's dtype: of the vector itself, or of its cast."""
        self._check_vector("params", params, (np.dtype(np.float16), np.dtype(np.float32), self.dtype))
        if params.dtype == self.dtype:
            return self._parameter_views.of(params)
        if params.dtype == np.float16 and self.dtype == np.float32:
            cast_up(params, self._cast)
        else:
            np.copyto(self._cast, params)
        return self._parameter_views.of(self._cast)

    def _check_vector(self, name: str, flat: np.ndarray, dtypes: tuple[np.dtype, ...]) -> None:
        numel = self.parts[-1].stop
        if flat.shape != (numel,) or flat.dtype not in dtypes or not flat.flags.c_contiguous:
            kinds = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
            raise ValueError(
                f"{name}: found shape {flat.shape}, dtype {flat.dtype.str}, strides {flat.strides}; "
                f"expected a contiguous vector of {numel} elements, {kinds}"
            )

    def _load(self, tokens: ArrayLike, targets: ArrayLike) -> Activations:
        """The arrays for this number of sequences, with the ids in place. Raises ValueError for bad ids."""
        tokens, targets = self._checked_shape("tokens", tokens), self._checked_shape("targets", targets)
        b, vocab = len(tokens), self.config.vocab_size
        if len(targets) != b:
            raise ValueError(f"targets: found {len(targets)} sequences, expected {b} as in tokens")
        if b not in self._activations:
            self._activations[b] = Activations.take(self._space, b, self.config, self.tensor.size)
        acts = self._activations[b]
        np.copyto(acts.ids[0], tokens)
        np.copyto(acts.ids[1], targets)
        unsigned = acts.ids.view(np.uintp)  # a negative id becomes a huge one: one comparison finds both kinds
        if np.maximum.reduce(unsigned, axis=None, initial=0) >= vocab:
            which, i, t = np.argwhere(unsigned >= vocab)[0]
            name, found = ("tokens", "targets")[which], (tokens, targets)[which][i, t]
            raise ValueError(f"{name}[{i}, {t}]: found id {found}, expected 0 to {vocab - 1}")
        np.add(acts.ids.reshape(2, -1), acts.row_starts, acts.places)
        return acts

    def _checked_shape(self, name: str, ids: ArrayLike) -> np.ndarray:
        ids, seq_len = np.asarray(ids), self.config.seq_len
        if ids.dtype.kind not in "iu" or ids.ndim != 2 or ids.shape[1] != seq_len or len(ids) > self.batch:
            raise ValueError(
                f"{name}: found shape {ids.shape}, dtype {ids.dtype}; "
                f"expected integers [b, {seq_len}] with b at most {self.batch}"
            )
        return ids


def _tell_nobody(start: int, stop: int) -> None:
    """The gradients' interval is ready, and nobody waits for it."""


def _sections(parts: tuple[Part, ...]) -> list[tuple[int, int]]:
    """Intervals of the flat vector whose gradients are ready together: the embeddings, each block, the end."""
    firsts = [p.start for p in parts if p.whole.name.endswith(("ln1.weight", "ln_f.weight"))]
    return list(pairwise([0, *firsts, parts[-1].stop]))


def forward(params: Parameters, acts: Activations, allreduce: Allreduce) -> float:
    """The sum of the cross entropy over the tokens whose ids are in `acts`, which then holds what `backward` needs."""
    x = acts.x
    embed(acts.ids[0], params.wte, params.wpe, x.reshape(*acts.ids.shape[1:], -1))
    for p, a in zip(params.blocks, acts.blocks, strict=True):
        linear(layer_norm(x, p.ln1, a.ln1), p.qkv, a.attention.qkv)
        z = causal_attention(a.attention)
        add_projection(x, z, p.attn_proj, acts.branch, allreduce)

        linear(layer_norm(x, p.ln2, a.ln2), p.fc, a.hidden)
        for chunk in a.gelu:
            gelu(*chunk)
        add_projection(x, a.active, p.mlp_proj, acts.branch, allreduce)
    np.dot(layer_norm(x, params.ln_f, acts.ln_f), params.head.T, acts.loss.logits)
    return cross_entropy(acts.loss)


def backward(
    params: Parameters, acts: Activations, grads: Parameters, allreduce: Allreduce, finish: Callable[[int], None]
) -> None:
    """The gradients of what `forward` returned, layer by layer from the last. Call it once after a `forward`.

    `finish(section)` follows each section of `_sections`, counted from 0, as soon as its gradients are there.
    """
    dx, branch, ones = acts.dx, acts.branch, acts.ones
    dlogits = cross_entropy_backward(acts.loss)
    np.dot(dlogits.T, acts.ln_f.y, grads.head)
    np.dot(dlogits, params.head, branch)
    layer_norm_backward(branch, params.ln_f, grads.ln_f, acts.ln_f, dx)
    finish(len(acts.blocks) + 1)
    for i in reversed(range(len(acts.blocks))):
        p, g, a = params.blocks[i], grads.blocks[i], acts.blocks[i]
        dhidden = add_projection_backward(dx, a.active, p.mlp_proj, g.mlp_proj, ones, acts.dhidden)
        np.multiply(dhidden, a.hidden, dhidden)  # times the slope of the GELU
        dh = linear_backward(dhidden, a.ln2.y, p.fc, g.fc, ones, branch, allreduce)
        np.add(dx, layer_norm_backward(dh, p.ln2, g.ln2, a.ln2, dh), dx)

        add_projection_backward(dx, a.attention.z, p.attn_proj, g.attn_proj, ones, a.attention.dz)
        dqkv = causal_attention_backward(a.attention)
        dh = linear_backward(dqkv, a.ln1.y, p.qkv, g.qkv, ones, branch, allreduce)
        np.add(dx, layer_norm_backward(dh, p.ln1, g.ln1, a.ln1, dh), dx)
        finish(i + 1)
    onehot = acts.loss.logits  # [N, V], free by now
    embed_backward(dx.reshape(*acts.ids.shape[1:], -1), acts.places[0], onehot, grads.wte, grads.wpe)
    finish(0)
