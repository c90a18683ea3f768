"""Restarts after crashes: for every directory of a list, what is found there, and that work can go on.

    python -m tests.programs.restart LIST.json

LIST.json holds objects {"root": ..., "save": [step, tag] that was interrupted, "before": [[step, tag], ...] that had
been committed, "newest": the outcomes that are right for the newest step, "then": what is saved after the restart, of
"same" and "next" step, "foreign": names that must stay}. Prints what is wrong on rank 0; the status is 1 then.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpi_ckpt import Checkpointer, CheckpointError, cli
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions
from tests.programs.states import blank, differences, state

comm = MPI.COMM_WORLD


def restored(ckpt: Checkpointer, step: int | None = None) -> list[Any] | None:
    """[step, tag] of what a restore brings back, after comparing every bit of it."""
    mine = blank(comm.rank, comm.size)
    found = ckpt.restore(mine, step)
    if found is None:
        return None
    wrong = comm.allgather(differences(mine, comm.rank, comm.size))
    assert not any(wrong), f"step {found.step} is a mix: rank by rank, other bits at {wrong}"
    assert mine["step"] == found.step, f"step {found.step} holds the state of step {mine['step']}"
    return [found.step, mine["tag"]]


def litter(root: Path, foreign: list[str]) -> list[str]:
    """Everything below `root` that belongs to no committed step, and is not foreign."""
    found = []
    for directory in root.glob("step_????????"):
        if directory.is_symlink() or not directory.is_dir():
            continue
        manifest = directory / "manifest.json"
        shards = json.loads(manifest.read_text())["shards"] if manifest.exists() else []
        listed = {"manifest.json", *(shard["path"] for shard in shards)}
        found += [f"{directory.name}/{name}" for name in sorted(set(os.listdir(directory)) - listed)]
        found += [] if shards else [directory.name]
    return [name for name in found if not any(Path(name) in (Path(f), *Path(f).parents) for f in foreign)]


def check_verify(root: Path, steps: list[int]) -> None:
    """Rank 0: the verb finds these steps, and all of them intact."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = cli.main(["verify", str(root)])
    lines = output.getvalue().splitlines()
    assert (status, len(lines)) == (0, len(steps)), output.getvalue()
    assert all(line.endswith("intact") for line in lines), output.getvalue()


def examine(root: Path, entry: dict[str, Any]) -> None:
    """One directory. Raises AssertionError, or whatever the engine raises."""
    step, tag = entry["save"]
    with Checkpointer(root, comm, keep=2, async_io=False) as ckpt:
        steps = ckpt.all_steps()
        newest = restored(ckpt)
        assert newest in entry["newest"], f"the newest step is {newest}, expected one of {entry['newest']}"
        allowed = [*entry["before"], [step, tag]]
        for committed in steps:
            assert restored(ckpt, committed) in allowed
        if steps:
            comm.rank or check_verify(root, steps)
        for which in entry["then"]:
            number = step + (which == "next")
            ckpt.save(number, state(comm.rank, comm.size, number, which), overwrite=number in steps)
            assert restored(ckpt, number) == [number, which]
            left = comm.bcast(litter(root, entry.get("foreign", [])))
            assert not left, f"after saving step {number} there is still {left}"
        steps = ckpt.all_steps()
        comm.rank or check_verify(root, steps)


def main() -> None:
    abort_on_uncaught_exceptions(comm)
    failed = 0
    for entry in json.loads(Path(sys.argv[1]).read_text()):
        root = Path(entry["root"])
        try:
            examine(root, entry)
            problem = ""
        except (AssertionError, CheckpointError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = comm.allgather(problem)
        if any(problems):
            failed += 1
            if comm.rank == 0:
                print(
                    f"{root.parent.name}/{root.name}:", *sorted(set(filter(None, problems))), sep="\n    ", flush=True
                )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
