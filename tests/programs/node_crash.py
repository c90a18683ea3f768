"""Launches in a node-local tier, one of whose ranks dies on the way, and the restarts after them.

    python -m tests.programs.node_crash ROOT base SCENARIO...          what each launch finds; and how many operations
    python -m tests.programs.node_crash ROOT kill SCENARIO RANK before|after NUMBER
    python -m tests.programs.node_crash ROOT restart LIST.json

`base` leaves ROOT/base and, in ROOT/operations.json, the operations that each rank would make below the nodes. `kill`
does what the scenario says in ROOT, a copy of that, and sends the rank SIGKILL at one of them (from 0). LIST.json holds
[root, scenario, saves] for `restart`: the newest has to be one of these saves, [step, tag], bit for bit, and work goes
on. Those of `base` have the tag "old".
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mpi4py import MPI

from mpi_ckpt import Checkpointer, CheckpointError
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions
from tests.cluster import leave_on_nodes
from tests.programs.faults import Operation, watched
from tests.programs.states import blank, differences, state

comm = MPI.COMM_WORLD

Watch = Callable[[], contextlib.AbstractContextManager[None]]


class Scenario(NamedTuple):
    """`before`: where the ranks of the launch ran that saved steps 1 and 2; `spoil` is done to what it left.

    Where it is `overwritten`, a copy of the directory in which step 2 was saved again lies beside it.
    """

    scheme: str
    act: Callable[[Path, Scenario, Watch], None]
    before: str = "abcd"
    spoil: Callable[[Path], None] = lambda root: None
    shared_every: int = 100
    overwritten: bool = False


# -- what is done, and watched ---------------------------------------------------------------------------------------


def save(root: Path, scenario: Scenario, watch: Watch) -> None:
    """Step 3, which pushes out step 1."""
    with opened(root, scenario, "abcd") as ckpt, watch():
        ckpt.save(3, state(comm.rank, comm.size, 3, "new"))


def save_again(root: Path, scenario: Scenario, watch: Watch) -> None:
    with opened(root, scenario, "abcd") as ckpt, watch():
        ckpt.save(2, state(comm.rank, comm.size, 2, "new"), overwrite=True)


def settle(root: Path, scenario: Scenario, watch: Watch) -> None:
    """What the launch before has left is finished, or cleaned."""
    with watch(), opened(root, scenario, "abcd"):
        pass


def restore(root: Path, scenario: Scenario, watch: Watch, of: str = "abcd") -> None:
    with opened(root, scenario, of) as ckpt, watch():
        ckpt.restore(blank(comm.rank, comm.size))


def protect_anew(root: Path, scenario: Scenario, watch: Watch) -> None:
    """Ranks that protected each other run on one node now: their files are moved, and all parity is made again."""
    restore(root, scenario, watch, "abab")


# -- what the launch before has left -----------------------------------------------------------------------------------


def between_the_renames(root: Path) -> None:
    """Step 2 is committed on one node, and step 3 on none."""
    for node in "abcd":
        directory = root / "nodes" / node / "step_00000002"
        shutil.copytree(directory, directory.with_name("step_00000003"))
        (directory.with_name("step_00000003") / "manifest.json").unlink()
        if node != "c":
            (directory / "manifest.json").rename(directory / "manifest.json.tmp")


def between_the_renames_of_an_overwrite(root: Path) -> None:
    """Step 2 of one node is of the later save, on the others the files of both lie side by side."""
    later = root.with_name(f"{root.name}.later")
    for node in "abcd":
        here, there = (place / "nodes" / node / "step_00000002" for place in (root, later))
        for path in there.iterdir():
            if path.name != "manifest.json" or node == "c":
                shutil.copy(path, here)


def too_much_lost(root: Path) -> None:
    for node in "bc":
        shutil.rmtree(root / "nodes" / node)


SCENARIOS = {
    "save-partner": Scenario("partner", save),
    "save-rs:2+1": Scenario("rs:2+1", save),
    "save-rs:2+2": Scenario("rs:2+2", save),
    "again-partner": Scenario("partner", save_again),
    "settle": Scenario("rs:2+1", settle, spoil=between_the_renames),
    "settle-again": Scenario("rs:2+1", settle, spoil=between_the_renames_of_an_overwrite, overwritten=True),
    "protect-partner": Scenario("partner", protect_anew, before="aabb"),
    "protect-rs:2+2": Scenario("rs:2+2", protect_anew, before="aaab"),
    "rebuild": Scenario("rs:2+2", restore, spoil=too_much_lost),
    "complete": Scenario("xor", restore, spoil=too_much_lost, shared_every=1),
}


@contextlib.contextmanager
def opened(root: Path, scenario: Scenario, of: str) -> Iterator[Checkpointer]:
    def report(event: dict) -> None:
        if comm.rank == 0 and event["event"] == "commit":
            (root / "reported").write_text(str(event["step"]))

    ckpt = Checkpointer(
        root / "shared",
        comm,
        local=f"{root}/nodes/{{domain}}",
        domain=of[comm.rank],
        redundancy=scenario.scheme,
        shared_every=scenario.shared_every,
        async_io=False,
        timeout=20.0,
        on_event=report,
    )
    leave_on_nodes(ckpt)
    with ckpt:
        yield ckpt


class Counter:
    """For `watched`: counts renames and removals, and kills this process at one of them."""

    def __init__(self, kill: tuple[str, int] | None = None) -> None:
        self.count = 0
        self._kill, self._lock = kill, threading.Lock()

    @contextlib.contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        if operation.call not in ("rename", "unlink"):
            yield
            return
        with self._lock:
            number, self.count = self.count, self.count + 1
        self._die("before", number)
        yield
        self._die("after", number)

    def _die(self, when: str, number: int) -> None:
        if self._kill == (when, number):
            os.kill(os.getpid(), signal.SIGKILL)


def base(root: Path, names: list[str]) -> None:
    counts = {}
    for name in names:
        scenario, directory = SCENARIOS[name], root / "base" / name
        with opened(directory, scenario, scenario.before) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state(comm.rank, comm.size, step, "old"))
        later, dry = directory.with_name(f"{name}.later"), root / "dry" / name
        if comm.rank == 0:
            (directory / "reported").unlink()
            shutil.copytree(directory, later)
        comm.Barrier()
        if scenario.overwritten:
            save_again(later, scenario, contextlib.nullcontext)
        if comm.rank == 0:
            scenario.spoil(directory)
            shutil.copytree(directory, dry)
        comm.Barrier()
        counter = Counter()
        scenario.act(dry, scenario, lambda dry=dry, counter=counter: watched(dry / "nodes", counter))
        counts[name] = comm.gather(counter.count)
    if comm.rank == 0:
        (root / "operations.json").write_text(json.dumps(counts))


def kill(root: Path, name: str, rank: str, when: str, number: str) -> None:
    with open("/proc/self/maps") as maps:  # a killed MPICH job leaves its shared memory behind: tell whose it is
        shared = {line.split()[5] for line in maps if "/dev/shm/mpich_shm" in line}
    (root / f"shared.{comm.rank}").write_text("\n".join(shared))
    counter = Counter((when, int(number)) if comm.rank == int(rank) else None)
    SCENARIOS[name].act(root, SCENARIOS[name], lambda: watched(root / "nodes", counter))


def examine(root: Path, name: str, saves: list[list]) -> None:
    with opened(root, SCENARIOS[name], "abcd") as ckpt:
        for which in ("newest", "next"):
            mine = blank(comm.rank, comm.size)
            found = ckpt.restore(mine)
            assert found is not None, "no step at all"
            assert found.step == mine["step"], f"step {found.step} holds the state of step {mine['step']}"
            save = [found.step, mine["tag"]]
            assert save in saves, f"the {which} save is {save}, expected one of {saves}"
            wrong = comm.allgather(differences(mine, comm.rank, comm.size))
            assert not any(wrong), f"step {found.step} is a mix: rank by rank, other bits at {wrong}"
            saves = [[found.step + 1, "next"]]
            ckpt.save(found.step + 1, state(comm.rank, comm.size, found.step + 1, "next"), overwrite=True)


def restart(root: Path, file: str) -> None:
    failed = False
    for directory, name, saves in json.loads(Path(root, file).read_text()):
        problem = ""
        try:
            examine(Path(directory), name, saves)
        except (AssertionError, CheckpointError) as error:
            problem = f"{type(error).__name__}: {error}"
        problems = {*comm.allgather(problem)} - {""}
        failed |= bool(problems)
        if problems and comm.rank == 0:
            print(directory, *sorted(problems), sep="\n    ", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    abort_on_uncaught_exceptions(comm)
    place, what, *rest = sys.argv[1:]
    if what == "base":
        base(Path(place), rest)
    elif what == "kill":
        kill(Path(place), *rest)
    else:
        restart(Path(place), *rest)
