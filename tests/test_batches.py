"""Tests that share a launch fail as they would alone: by name, without taking others with them, and none unseen."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from tests.launch import ROOT

CASES = """
import os, time, signal
import pytest

two = pytest.mark.mpi(ranks=[2], timeout=60)

@pytest.fixture(autouse=True)
def noted(mpi_ranks, request):
    if "mpi" in request.keywords and request.getfixturevalue("comm").rank == 0:
        with open("launches", "a") as file:
            print(request.node.originalname, os.getppid(), file=file)

@two
def test_passes(comm):
    assert comm.allreduce(1) == 2

@pytest.mark.mpi(ranks=[1, 2], timeout=60)
@pytest.mark.parametrize("case", ["good", "bad"])
def test_fails_on_rank_1(comm, case):
    assert comm.rank == 0 or case == "good"
    comm.Barrier()

@two
def test_leaves_traffic_behind(comm):
    if comm.rank == 0:
        comm.isend("unread", 1)

@two
def test_kills_itself(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()

@two
@pytest.mark.skip(reason="for a reason")
def test_is_skipped(comm):
    raise AssertionError

@pytest.mark.mpi(ranks=[2], timeout=3)
def test_hangs(comm):
    if comm.rank == 1:
        time.sleep(600)
    comm.Barrier()

def test_without_mpi():
    pass

@two
def test_comes_last(comm):
    comm.Barrier()
"""
EXPECTED = {
    "test_passes[2]": "passed",
    "test_fails_on_rank_1[1-good]": "passed",
    "test_fails_on_rank_1[2-good]": "passed",
    "test_fails_on_rank_1[1-bad]": "passed",
    "test_fails_on_rank_1[2-bad]": "assert (1 == 0 or 'bad' == 'good'",
    "test_leaves_traffic_behind[2]": "passed",
    "test_kills_itself[2]": "a rank has ended before its time",
    "test_is_skipped[2]": "skipped",
    "test_hangs[2]": "still running after 3 s: a hang",
    "test_without_mpi": "passed",
    "test_comes_last[2]": "passed",
}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A session of its own with the cases above; its directory."""
    place = tmp_path_factory.mktemp("batches")
    (place / "conftest.py").write_text("from tests.batches import pytest_configure\n")
    (place / "test_cases.py").write_text(CASES)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "--rootdir=.", "--junit-xml=results.xml", "test_cases.py"]
    said = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=300)
    assert said.returncode == 1, said.stdout + said.stderr
    return place


def outcomes(place) -> dict[str, set[str]]:
    """What is said about each test, by any rank: passed, skipped, or the first line of a failure."""
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(place / "results.xml").iter("testcase"):
        bad = [child.tag if child.tag == "skipped" else child.get("message", "") for child in case]
        found.setdefault(case.attrib["name"].partition("[rank=")[0], set()).update(bad or ["passed"])
    return found


def test_each_test_has_its_own_outcome_and_a_failure_says_why(session):
    found = outcomes(session)
    assert found.keys() == EXPECTED.keys()
    for name, words in EXPECTED.items():
        assert any(words in said for said in found[name]), (name, found[name])
        assert words not in ("passed", "skipped") or found[name] <= {words, "passed"}, (name, found[name])


def test_one_launch_goes_on_until_a_test_fails_and_the_next_from_there(session):
    launches: dict[str, list[str]] = {}
    for name, parent in map(str.split, (session / "launches").read_text().splitlines()):
        launches.setdefault(parent, []).append(name.removeprefix("test_"))
    assert [*launches.values()] == [
        ["passes", "fails_on_rank_1", "fails_on_rank_1"],
        ["fails_on_rank_1", "fails_on_rank_1"],  # on one rank
        ["leaves_traffic_behind", "kills_itself"],
        ["hangs"],
        ["comes_last"],
    ]
