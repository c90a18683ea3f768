"""What `verify` finds out about a step, and how it says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpi_ckpt.errors import CheckpointError, CorruptShard, RemoteFailed
from mpi_ckpt.storage.places import Directory, Place
from mpi_ckpt.tools import text


@dataclass(frozen=True)
class Verdict:
    """What was found about one step: its size in bytes, and every fault.

    `advice` says what helps against the faults, if there are any. In the directories of nodes, of which `directory` is
    the first, `elsewhere` are the ranks of whose files nothing lies there, which is no fault.
    """

    step: int
    directory: Directory
    nbytes: int
    faults: list[CheckpointError]
    elsewhere: tuple[int, ...] = ()
    advice: str | None = None

    @property
    def intact(self) -> bool:
        """True when every file is what the manifest says."""
        return not self.faults

    def print(self) -> None:
        """For people."""
        print(f"step {self.step:8d}  {text.size(self.nbytes):>10}  {'intact' if self.intact else 'DAMAGED'}")
        for fault in self.faults:
            print(f"  {fault}")
        if self.faults and self.advice:
            print(f"  {self.advice}")
        if self.elsewhere:
            ranks = ", ".join(map(str, self.elsewhere[:16])) + (", ..." if len(self.elsewhere) > 16 else "")
            print(f"  on other nodes, or lost: what rank{'s' * (len(self.elsewhere) > 1)} {ranks} saved")

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        faults = [
            {"kind": type(f).__name__, "path": f.path, "rank": f.rank, "found": f.found, "expected": f.expected}
            | {"message": str(f)}
            for f in self.faults
        ]
        found = {"step": self.step, "directory": str(self.directory), "nbytes": self.nbytes, "intact": self.intact}
        found |= {"faults": faults}
        return found | {"elsewhere": list(self.elsewhere), "advice": self.advice if self.faults else None}


def without_action(faults: list[CheckpointError]) -> list[CheckpointError]:
    """What each says is for a launch that restores; here one thing helps against all of them, which is said once."""
    for fault in faults:
        fault.action = None
    return faults


def fault_of(check: Callable[[], object], path: Place, rank: int) -> CheckpointError | None:
    """**Local.** What `check`, which reads a file of `rank`, finds wrong with it, if anything. Raises RemoteFailed."""
    try:
        check()
    except RemoteFailed:
        raise
    except CheckpointError as fault:
        return fault
    except OSError as error:
        return CorruptShard(
            "a file cannot be read",
            path=path,
            rank=rank,
            found=error,
            expected="a readable file",
            action="Look at the disk and the file's permissions, or bring the file back from a copy.",
        )
    return None
