"""One difference between two steps, as `diff` reports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpi_ckpt.tools.compare import Difference


@dataclass(frozen=True)
class Finding:
    """What differs: `kind` is array, parameter, value, metric or meta.

    Of arrays and parameters that have the same dtype and shape in both steps, `bits` says how they differ. Of anything
    else `a` and `b` say in words what the two steps have.
    """

    kind: str
    name: str
    a: str = ""
    b: str = ""
    shape: tuple[int, ...] = ()
    bits: Difference | None = None

    @property
    def first_index(self) -> tuple[int, ...] | None:
        """The index, in its array, of the first element that differs."""
        if self.bits is None or self.bits.first is None:
            return None
        return tuple(map(int, np.unravel_index(self.bits.first, self.shape)))

    def as_json(self) -> dict[str, Any]:
        """The finding as plain JSON."""
        if self.bits is None:
            return {"kind": self.kind, "name": self.name, "a": self.a, "b": self.b}
        bits = self.bits
        return {
            "kind": self.kind,
            "name": self.name,
            "differing": bits.count,
            "of": int(np.prod(self.shape, dtype=int)),
            "max_abs": bits.max_abs,
            "max_rel": bits.max_rel,
            "nonfinite": bits.nonfinite,
            "first_index": list(self.first_index or ()),
        }

    def as_row(self) -> tuple[str, ...]:
        """The finding as cells: kind, name, what differs, max abs, max rel, first index."""
        if self.bits is None:
            return self.kind, self.name, f"{self.a} | {self.b}", "", "", ""
        bits, total = self.bits, int(np.prod(self.shape, dtype=int))
        some = bits.count > bits.nonfinite
        what = f"{bits.count} of {total}" + (f", {bits.nonfinite} not finite" if bits.nonfinite else "")
        numbers = (f"{bits.max_abs:.3g}", f"{bits.max_rel:.3g}") if some else ("-", "-")
        return self.kind, self.name, what, *numbers, ", ".join(map(str, self.first_index or ())) or "()"
