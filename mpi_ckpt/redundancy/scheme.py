"""What a scheme of redundancy costs and what it survives: pure numbers.

    single    nothing beside the data                         B bytes a rank                survives no loss
    partner   a copy on another failure domain                2 B                           the loss of one domain
    xor       one parity over a group of n ranks              B + B / (n - 1)               the loss of one domain
    rs:k+m    m parities over a group of n = k + m ranks      B + B m / k                   the loss of m domains

The levels and their costs are those of SCR, the Scalable Checkpoint / Restart library (A. Moody et al., "Design,
Modeling, and Evaluation of a Scalable Multi-level Checkpointing System", SC 2010; scr.readthedocs.io).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mpi_ckpt.errors import UnusableOption

XOR_SIZE = 8  # members of an xor group, where there are so many: SCR's default set size
MAX_RS = 128  # k + m: groups grow to less than twice that, and GF(2^8) has 256 elements to tell pieces apart
KINDS = ("single", "partner", "xor", "rs:k+m")

_RS = re.compile(r"rs:([1-9][0-9]{0,2})\+([1-9][0-9]{0,2})")


@dataclass(frozen=True)
class Scheme:
    """`size`: members of a parity group, or more where the numbers do not divide; `parities`: m of them a stripe."""

    kind: str
    size: int
    parities: int

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """From "single", "partner", "xor" or "rs:k+m" (rs:4+2). Raises UnusableOption for anything else."""
        if text == "single":
            return cls("single", 1, 0)
        if text == "partner":
            return cls("partner", 2, 1)
        if text == "xor":
            return cls("xor", XOR_SIZE, 1)
        match = _RS.fullmatch(text)
        k, m = (int(match[1]), int(match[2])) if match else (0, 0)
        if not match or k + m > MAX_RS:
            raise UnusableOption(
                "no such scheme of redundancy",
                found=repr(text),
                expected=f"one of {', '.join(KINDS)}, with k + m of at most {MAX_RS}",
                action="For one lost node take xor; for two, rs:4+2.",
            )
        return cls("rs", k + m, m)

    def __str__(self) -> str:
        return f"rs:{self.size - self.parities}+{self.parities}" if self.kind == "rs" else self.kind

    @property
    def tolerance(self) -> int:
        """How many failure domains may be lost at once, where no two members of a group share one."""
        return self.parities

    def stored_bytes(self, nbytes: int, members: int | None = None) -> int:
        """Bytes that a rank stores for `nbytes` of data, in a group of `members` (default: the scheme's size)."""
        n = self.size if members is None else members
        if self.kind == "partner":
            return 2 * nbytes
        return nbytes + -(-nbytes * self.parities // (n - self.parities))
