"""The layers of a transformer, forward and backward side by side, each with its formula.

Shapes: b sequences of T positions make N = b T tokens; d is the embedding, V the vocabulary. `dy` means the derivative
of the loss with respect to `y`. Results go into arrays that are passed in, and nothing of their size is allocated. Sums
over rows or columns are products with a vector of ones or 1 / d: BLAS is several times faster at them than `np.sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mpi_ckpt.model.parameters import WeightBias
from mpi_ckpt.model.workspace import Workspace

Allreduce = Callable[[np.ndarray], None]  # replaces an array by its sum over the tensor ranks

NORM_EPSILON = 1e-5
GELU_CUBIC = 0.044715
GELU_SCALE = math.sqrt(2 / math.pi)
GELU_CHUNK = 32768  # elements: the four arrays of a chunk stay in the second-level cache through all passes


class NormBuffers(NamedTuple):
    """Arrays of one layer norm: its output, what its backward needs, and scratch that all of them share."""

    y: np.ndarray  # [N, d]
    normed: np.ndarray  # [N, d] (x - mean) / sigma
    inv_sigma: np.ndarray  # [N] 1 / sigma
    product: np.ndarray  # [N, d] scratch
    row_a: np.ndarray  # [N] scratch
    row_b: np.ndarray  # [N] scratch
    column: np.ndarray  # [d] scratch
    ones: np.ndarray  # [N]
    average: np.ndarray  # [d] 1 / d

    @classmethod
    def take(cls, space: Workspace, name: str, n: int, d: int) -> NormBuffers:
        """Buffers for n tokens of width d."""
        ones, average = space.take("norm.ones", n), space.take("norm.average", d)
        ones.fill(1.0)
        average.fill(1.0 / d)
        own = space.take(f"{name}.y", n, d), space.take(f"{name}.normed", n, d), space.take(f"{name}.inv_sigma", n)
        rows = space.take("norm.row_a", n), space.take("norm.row_b", n)
        return cls(*own, space.take("norm.product", n, d), *rows, space.take("norm.column", d), ones, average)


def layer_norm(x: np.ndarray, p: WeightBias, buf: NormBuffers) -> np.ndarray:
    """y = w * (x - mean) / sigma + b,   sigma^2 = mean((x - mean)^2) + epsilon,   means along a row.

    x [N, d] -> y [N, d].   (arXiv:1607.06450)
    """
    y, normed, mean, inv_sigma = buf.y, buf.normed, buf.row_a, buf.inv_sigma
    np.dot(x, buf.average, mean)
    np.subtract(x, mean[:, None], normed)
    np.multiply(normed, normed, y)
    np.dot(y, buf.average, inv_sigma)
    np.add(inv_sigma, NORM_EPSILON, inv_sigma)
    np.sqrt(inv_sigma, inv_sigma)
    np.reciprocal(inv_sigma, inv_sigma)
    np.multiply(normed, inv_sigma[:, None], normed)
    np.multiply(normed, p.weight, y)
    np.add(y, p.bias, y)
    return y


def layer_norm_backward(
    dy: np.ndarray, p: WeightBias, grad: WeightBias, buf: NormBuffers, dx: np.ndarray
) -> np.ndarray:
    """With n = (x - mean) / sigma:   dw = sum of dy * n,   db = sum of dy,   over tokens;

    dx = (w * dy - mean(w * dy) - n * mean(w * dy * n)) / sigma,   means along a row.

    dy [N, d] -> dx [N, d], which may be the same array.
    """
    product, w_over_d = buf.product, buf.column
    np.multiply(dy, buf.normed, product)
    np.dot(buf.ones, product, grad.weight)
    np.dot(buf.ones, dy, grad.bias)
    np.multiply(p.weight, buf.average, w_over_d)
    mean = np.dot(dy, w_over_d, buf.row_a)
    mean_n = np.dot(product, w_over_d, buf.row_b)
    np.multiply(dy, p.weight, dx)
    np.subtract(dx, mean[:, None], dx)
    np.multiply(buf.normed, mean_n[:, None], product)
    np.subtract(dx, product, dx)
    np.multiply(dx, buf.inv_sigma[:, None], dx)
    return dx


def linear(x: np.ndarray, p: WeightBias, y: np.ndarray) -> np.ndarray:
    """y = x W^T + b.   x [N, in], W [out, in] -> y [N, out]."""
    np.dot(x, p.weight.T, y)
    np.add(y, p.bias, y)
    return y


def linear_backward(
    dy: np.ndarray,
    x: np.ndarray,
    p: WeightBias,
    grad: WeightBias,
    ones: np.ndarray,
    dx: np.ndarray,
    allreduce: Allreduce,
) -> np.ndarray:
    """dW = dy^T x,   db = sum of dy over tokens,   dx = dy W.   dy [N, out], x [N, in], ones [N] -> dx [N, in].

    With dy and the rows of W split over ranks, dx is a sum over them.
    """
    np.dot(dy.T, x, grad.weight)
    np.dot(ones, dy, grad.bias)
    np.dot(dy, p.weight, dx)
    allreduce(dx)
    return dx


def add_projection(x: np.ndarray, z: np.ndarray, p: WeightBias, product: np.ndarray, allreduce: Allreduce) -> None:
    """x += z W + b, in place: a block's part of the residual stream.   z [N, in], W [in, out], x [N, out].

    With z and the rows of W split over ranks, z W is a sum over them: `product` [N, out] is added up before b is added.
    """
    np.dot(z, p.weight, product)
    allreduce(product)
    np.add(x, product, x)
    np.add(x, p.bias, x)


def add_projection_backward(
    dx: np.ndarray, z: np.ndarray, p: WeightBias, grad: WeightBias, ones: np.ndarray, dz: np.ndarray
) -> np.ndarray:
    """dW = z^T dx,   db = sum of dx over tokens,   dz = dx W^T;   dx passes on unchanged along the residual stream.

    dx [N, out], z [N, in], ones [N] -> dz [N, in].
    """
    np.dot(z.T, dx, grad.weight)
    np.dot(ones, dx, grad.bias)
    np.dot(dx, p.weight.T, dz)
    return dz


class GeluChunk(NamedTuple):
    """Flat pieces of equal length of the arrays of a GELU."""

    x: np.ndarray  # the input, then the slope
    y: np.ndarray  # the output
    s: np.ndarray  # scratch
    h: np.ndarray  # scratch

    @classmethod
    def take(cls, space: Workspace, x: np.ndarray, y: np.ndarray) -> tuple[GeluChunk, ...]:
        """The chunks that cover the contiguous arrays x and y."""
        x, y = x.reshape(-1), y.reshape(-1)
        size = min(GELU_CHUNK, len(x))
        s, h = space.take("gelu.s", size), space.take("gelu.h", size)
        starts = range(0, len(x), GELU_CHUNK)
        pieces = [(x[i : i + size], y[i : i + size]) for i in starts]
        return tuple(cls(px, py, s[: len(px)], h[: len(px)]) for px, py in pieces)


def gelu(x: np.ndarray, y: np.ndarray, s: np.ndarray, h: np.ndarray) -> None:
    """y = x h,   h = (1 + tanh u) / 2,   u = c (x + 0.044715 x^3),   c = sqrt(2 / pi).   (arXiv:1606.08415, section 2)

    On return x holds the slope   dy/dx = h + y (1 - h) 2u',   2u' = 2c (1 + 3 * 0.044715 x^2) = 6 u / x - 4c,
    so that the backward is one product. All arguments have one shape; s and h are scratch.
    """
    np.multiply(x, x, s)
    np.multiply(s, GELU_SCALE * GELU_CUBIC, s)
    np.add(s, GELU_SCALE, s)  # s = u / x
    np.multiply(s, x, h)
    np.tanh(h, h)
    np.multiply(h, 0.5, h)
    np.add(h, 0.5, h)
    np.multiply(x, h, y)
    np.multiply(s, 6.0, s)
    np.subtract(s, 4.0 * GELU_SCALE, s)  # s = 2u'
    np.multiply(s, y, s)
    np.subtract(1.0, h, x)
    np.multiply(x, s, x)
    np.add(x, h, x)


def embed(tokens: np.ndarray, wte: np.ndarray, wpe: np.ndarray, x: np.ndarray) -> None:
    """x[i, t] = wte[tokens[i, t]] + wpe[t].   tokens [b, T], wte [V, d], wpe [T, d] -> x [b, T, d]."""
    np.take(wte, tokens, axis=0, out=x, mode="clip")  # mode "raise" would go through a copy of `out`
    np.add(x, wpe, x)


def embed_backward(dx: np.ndarray, place: np.ndarray, onehot: np.ndarray, dwte: np.ndarray, dwpe: np.ndarray) -> None:
    """dwte = onehot(tokens)^T dx,   dwpe = sum of dx over sequences.   dx [b, T, d].

    `onehot` [N, V] is scratch, `place` [N] the place of each token's 1 in its flat memory. The product costs what one
    of the head's three does; `np.add.at` takes two to four times as long at small V.
    """
    onehot.fill(0.0)
    onehot.reshape(-1)[place] = 1.0
    np.dot(onehot.T, dx.reshape(len(onehot), -1), dwte)
    np.add.reduce(dx, axis=0, out=dwpe)
