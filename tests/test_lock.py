"""One writer a directory: a second launch is refused by name, a crash blocks nobody, and an orphan cannot commit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from mpi_ckpt import cli
from tests.launch import HANG, Job, Launcher, Outcome
from tests.ranks import contents

RANKS = 2


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "checkpoints"


def start(launch: Launcher, root: Path, name: str, *words: object) -> Job:
    return launch.start(RANKS, "-m", "tests.programs.writer", root, name, *map(str, words))


def until_ready(job: Job, root: Path, name: str) -> None:
    deadline = time.monotonic() + HANG
    while not root.with_name(f"{root.name}.{name}.ready").exists():
        assert job.process.poll() is None, job.output()
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.01)


def go(job: Job, root: Path, name: str) -> Outcome:
    root.with_name(f"{root.name}.{name}.go").touch()
    return job.wait()


def steps(root: Path) -> list[int]:
    """The committed steps, all of which are intact."""
    assert cli.main(["verify", str(root)]) == 0
    return sorted(int(path.parent.name[5:]) for path in root.glob("step_*/manifest.json"))


def check_refused(outcome: Outcome, *words: str) -> None:
    assert outcome.status == 3, outcome.stdout + outcome.stderr
    for rank in range(RANKS):
        (line,) = re.findall(rf"^\[rank {rank}\] (DirectoryInUse: .*)$", outcome.stdout, re.M)
        for word in ("writer.lock", "found launch", "expected", *words):
            assert word in line


def test_a_second_launch_is_refused_and_told_who_is_there(launch, root):
    first = start(launch, root, "first", 1, "wait", 2)
    until_ready(first, root, "first")
    owner = json.loads((root / "writer.lock").read_text())
    assert owner["pid"] in first.ranks()
    before = contents(root)
    outcome = start(launch, root, "second", 9).wait()
    check_refused(outcome, f"pid {owner['pid']} on {socket.gethostname()}", owner["launch"])
    assert contents(root) == before
    go(first, root, "first").check()
    assert steps(root) == [1, 2]
    start(launch, root, "third", 3).wait().check()
    assert steps(root) == [2, 3]


def test_a_killed_launch_does_not_block_the_next(launch, root):
    first = start(launch, root, "first", 1, "wait")
    until_ready(first, root, "first")
    for pid in [*first.ranks(), first.process.pid]:
        os.kill(pid, signal.SIGKILL)
    first.end()
    assert (root / "writer.lock").read_text(), "it left its name behind"
    start(launch, root, "second", 2).wait().check()
    assert steps(root) == [1, 2]


# Where flock is not there to refuse it, a successor takes over while ranks of the old launch still live.


@pytest.mark.parametrize(
    "blocked",
    [(), (0, 2, "fsync"), (1, 2, "fsync"), (1, 2, "rename")],
    ids=["idle", "rank 0 is writing", "rank 1 is writing", "rank 1 is about to publish"],
)
def test_an_orphan_harms_nothing_of_its_successor(launch, root, blocked):
    words = (1, 2, "--block", *blocked) if blocked else (1, "wait", 4)
    orphan = start(launch, root, "orphan", *words, "--no-flock")
    until_ready(orphan, root, "orphan")
    successor = start(launch, root, "successor", 2, 3, "wait", 5, "--no-flock")
    until_ready(successor, root, "successor")
    before = contents(root)
    owner = json.loads(before["writer.lock"])
    outcome = go(orphan, root, "orphan")
    if blocked[2:] != ("rename",):  # its temporary file is gone: that is the error then
        check_refused(outcome, owner["launch"], f"pid {owner['pid']}")
    assert outcome.status == 3
    assert contents(root) == before
    go(successor, root, "successor").check()
    assert steps(root) == [3, 5]


def test_an_orphan_does_not_write_into_the_file_that_its_successor_writes(launch, root):
    orphan = start(launch, root, "orphan", 1, 2, "--block", 1, 2, "open", "--no-flock")
    until_ready(orphan, root, "orphan")
    successor = start(launch, root, "successor", 2, "--block", 1, 2, "fsync", "--no-flock")
    until_ready(successor, root, "successor")
    assert go(orphan, root, "orphan").status == 3
    go(successor, root, "successor").check()
    assert steps(root) == [1, 2]
