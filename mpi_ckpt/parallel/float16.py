"""float32 -> float16 by bit operations: the same bits as NumPy's `astype`, in half the time.

NumPy converts one element after the other; here a few vectorised operations round a whole block. The idea, adding a
power of two so that the float32 addition itself rounds at float16's last bit, is Marat Dukhan's (the FP16 library).
"""

from __future__ import annotations

import numpy as np

from mpi_ckpt.parallel.aligned import aligned_zeros

_EXPONENT = np.uint32(0x7F800000)
_SMALLEST_NORMAL = np.uint32((127 - 14) << 23)  # 2^-14, the smallest normal float16, as float32 bits
_TOO_LARGE = np.float32(2.0**16)  # from here on the exponent does not fit float16
_SHIFT = np.uint32(23 - 10)  # from float32's exponent field to float16's
_DOWN = np.float32(2.0**-13)
_REBIAS = np.uint32((-113 << 10) & 0xFFFF)  # the exponent 2^-14 becomes 0 in float16's field; modulo 2^16
_SIGN_SHIFT = np.uint32(16)
_SIGN = np.uint32(0x8000)


class Float16Cast:
    """Converts blocks of at most `block` elements in workspaces of its own (12 bytes an element)."""

    def __init__(self, block: int) -> None:
        self._a = aligned_zeros(block, np.uint32)
        self._b = aligned_zeros(block, np.uint32)
        self._floor = aligned_zeros(block, np.uint32)  # NumPy's maximum with a scalar is 2.5 times slower
        self._floor.fill(_SMALLEST_NORMAL)

    def __call__(self, source: np.ndarray, out: np.ndarray) -> None:
        """**Local.** `source` float32 [n] -> `out` float16 [n], n <= block, both contiguous.

        Rounds to nearest, ties to even. With E = max(exponent of x, -14), the float32 sum 2^E + |x| 2^-13 has its last
        bit at 2^(E - 23), that is at 2^(E - 10) of |x|: float16's last bit, for subnormal results too. The sum's low
        bits then hold |x| in units of it, hidden bit included, and its exponent field E + 127; float16's bits are
        ((E + 14) << 10) plus those units: a carry into the exponent is right, up to infinity.
        """
        a, b = self._a[: source.size], self._b[: source.size]
        magnitude = np.abs(source, out=a.view(np.float32))
        if source.size and not np.maximum.reduce(magnitude) < _TOO_LARGE:  # NaN and infinity take this way too
            np.copyto(out, source, casting="unsafe")
            return
        power = np.bitwise_and(a, _EXPONENT, out=b)
        np.maximum(power, self._floor[: source.size], out=power)
        np.multiply(magnitude, _DOWN, out=magnitude)
        np.add(magnitude, power.view(np.float32), out=magnitude)
        half = np.right_shift(a, _SHIFT, out=b)
        np.add(half, a, out=half)  # only the low 16 bits count from here on
        sign = np.right_shift(source.view(np.uint32), _SIGN_SHIFT, out=a)
        np.bitwise_and(sign, _SIGN, out=sign)
        np.add(half, sign, out=half)
        np.add(half, _REBIAS, out=half)
        np.copyto(out.view(np.uint16), half, casting="unsafe")
