"""Retention: the newest K in numeric order stay, and nothing goes that is pinned, held, or has no successor yet."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_ckpt import Checkpointer, SaveFailed, Shard
from mpi_ckpt.checkpoint.retention import Policy, choose
from tests.checkpoints import flip, on_one, raised, shard_file, step_dir

# -- the decision ----------------------------------------------------------------------------------------------------


def test_steps_are_compared_as_numbers():
    assert choose([9, 10, 11, 99, 100, 1000], Policy(keep=2)) == [9, 10, 11, 99]
    assert choose([1000, 9, 100, 10, 99, 11], Policy(keep=2)) == [9, 10, 11, 99], "in whatever order they are listed"
    assert choose([99_999_999, 100_000_000, 5], Policy(keep=1)) == [5, 99_999_999], "more digits than eight"


def test_what_is_held_neither_goes_nor_counts():
    assert choose([1, 2, 3, 4, 5], Policy(keep=2), held=frozenset({1, 5})) == [2]
    assert choose([1, 2], Policy(keep=1), held=frozenset({1, 2, 77})) == []
    assert choose([], Policy(keep=1)) == []
    assert choose([1, 2, 3], Policy(keep=None)) == []
    assert choose([1, 2, 3], Policy(keep=3)) == []


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.sets(st.integers(0, 2000)), st.integers(1, 5), st.sets(st.integers(0, 2000), max_size=5), st.randoms())
def test_of_any_steps_the_newest_rotating_ones_stay_and_only_they(steps, keep, held, shuffler):
    listed = list(steps)
    shuffler.shuffle(listed)
    doomed = choose(listed, Policy(keep=keep), held=frozenset(held))
    assert doomed == sorted(set(doomed))
    assert set(doomed) <= steps - held
    left = sorted(steps - held - set(doomed))
    assert len(left) == min(keep, len(steps - held))
    assert not doomed or not left or max(doomed) < min(left)


# -- the deed --------------------------------------------------------------------------------------------------------


def state(comm, step: int) -> dict[str, Any]:
    return {"a": Shard(np.full(3, step, "<f8"), 3 * comm.rank, 3 * comm.size), "n": step}


def save(checkpointer: Checkpointer, comm, *steps: int) -> list[int]:
    for step in steps:
        checkpointer.save(step, state(comm, step))
    checkpointer.wait_until_finished()
    return checkpointer.all_steps()


def fail_to_save(checkpointer: Checkpointer, comm, step: int) -> None:
    """A save whose rename fails on the last rank; afterwards nothing stands in the way."""
    obstacle = shard_file(checkpointer.root, step, comm.size - 1)
    on_one(comm, lambda: (obstacle.mkdir(parents=True), (obstacle / "foreign").touch()))

    def attempt() -> None:
        checkpointer.save(step, state(comm, step))
        checkpointer.wait_until_finished()

    raised(comm, SaveFailed, attempt)
    on_one(comm, lambda: shutil.rmtree(step_dir(checkpointer.root, step)))


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_step_goes_only_once_a_newer_one_is_committed(comm, shared_path):
    root = shared_path / "c"
    with Checkpointer(root, comm, keep=1) as checkpointer:
        assert save(checkpointer, comm, 9) == [9]
        fail_to_save(checkpointer, comm, 10)
        assert checkpointer.all_steps() == [9], "keep=1, and the next save failed"
        target = state(comm, 0)
        assert checkpointer.restore(target).step == 9
        assert target["n"] == 9
        assert save(checkpointer, comm, 10) == [10]
        assert save(checkpointer, comm, 99, 100, 1000) == [1000]
    with Checkpointer(root, comm, keep=None) as checkpointer:
        assert save(checkpointer, comm, 1001, 1002) == [1000, 1001, 1002]
    with Checkpointer(root, comm, keep=2) as checkpointer:
        assert checkpointer.restore(state(comm, 0), 1000).step == 1000
    with Checkpointer(root, comm, keep=2) as checkpointer:  # restored, and ended before the next save
        assert checkpointer.all_steps() == [1000, 1001, 1002]
        assert checkpointer.restore(state(comm, 0), 1000).step == 1000
        for _ in range(3):
            fail_to_save(checkpointer, comm, 1003)
            assert 1000 in checkpointer.all_steps(), "held: the run was restored from it and has nothing newer"
        assert save(checkpointer, comm, 1003)[-1] == 1003
        assert save(checkpointer, comm, 1004) == [1003, 1004], "no longer held"

        def save_again() -> None:
            checkpointer.save(1003 if comm.rank < 2 else 1005, state(comm, 7), overwrite=True)
            checkpointer.wait_until_finished()

        raised(comm, SaveFailed, save_again)
        assert checkpointer.all_steps() == [1003, 1004], "it went before its new content was there"
        for step in checkpointer.all_steps():
            target = state(comm, 0)
            checkpointer.restore(target, step)
            assert target["a"].array.tolist() == [step] * 3


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_pinned_steps_stay_and_damaged_or_incomplete_ones_do_not_count(comm, shared_path):
    root = shared_path / "c"
    with Checkpointer(root, comm, keep=2) as checkpointer:
        save(checkpointer, comm, 9, 10)
        on_one(comm, lambda: (step_dir(root, 9) / "pinned").touch())
        assert save(checkpointer, comm, 11, 12, 13) == [9, 12, 13]
        on_one(comm, lambda: flip(shard_file(root, 13, 1), -1))
        assert checkpointer.restore(state(comm, 0), on_damage="older").step == 12  # sets 13 aside
        on_one(comm, lambda: (step_dir(root, 500).mkdir(), shard_file(root, 500, 0).write_bytes(b"half")))
        assert save(checkpointer, comm, 14) == [9, 12, 14], "two whole ones beside the pinned one"
        on_one(comm, lambda: (step_dir(root, 9) / "pinned").unlink())
        assert save(checkpointer, comm, 15) == [14, 15]
    assert (step_dir(root, 13) / "manifest.damaged.json").exists()
    assert not step_dir(root, 500).exists()


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_the_best_step_is_the_best_of_those_that_are_there_now(comm, shared_path):
    root = shared_path / "c"
    with Checkpointer(root, comm, keep=1, best_metric="loss") as checkpointer:
        for step, loss in ((1, 0.1), (2, 5.0), (3, 4.0)):
            checkpointer.save(step, state(comm, step), metrics={"loss": loss})
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 3]
        checkpointer.save(1, state(comm, 1), metrics={"loss": 9.0}, overwrite=True)  # the record is gone
        for step, loss in ((4, 3.0), (5, 4.0)):
            checkpointer.save(step, state(comm, step), metrics={"loss": loss})
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [4, 5]
        on_one(comm, lambda: (step_dir(root, 4) / "manifest.json").write_text("damaged"))
    with Checkpointer(root, comm, keep=1, best_metric="loss") as checkpointer:  # a new launch reads all metrics again
        checkpointer.save(6, state(comm, 6), metrics={"loss": 8.0})
        checkpointer.wait_until_finished()
        assert checkpointer.latest_step() == 6, "a damaged manifest is no reason to stop saving"


def immutable(path: Path, on: bool) -> bool:
    """Whether the file system lets even root be kept from deleting a file."""
    return subprocess.run(["chattr", "+i" if on else "-i", path], capture_output=True).returncode == 0


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_that_cannot_be_deleted_is_logged_and_left_and_once_begun_never_valid_again(comm, shared_path, caplog):
    root = shared_path / "c"

    def obstruct() -> None:
        manifest = step_dir(root, 1) / "manifest.json"
        manifest.rename(root / "kept")
        manifest.mkdir()  # a directory cannot be unlinked
        (step_dir(root, 2) / "notes.txt").write_text("not ours")

    with Checkpointer(root, comm, keep=3) as checkpointer, caplog.at_level(logging.WARNING):
        save(checkpointer, comm, 1, 2, 3)
        on_one(comm, obstruct)
        assert save(checkpointer, comm, 4, 5, 6) == [1, 4, 5, 6], "the others go all the same"
        said = [r.getMessage() for r in caplog.records if "cannot delete step 1" in r.getMessage()]
        assert bool(said) == (comm.rank == 0)
        assert [path.name for path in step_dir(root, 2).iterdir()] == ["notes.txt"], "what is not ours stays"
        on_one(comm, lambda: shutil.rmtree(step_dir(root, 1)))
        stuck = shard_file(root, 4, 1)
        if comm.bcast(immutable(stuck, True) if comm.rank == 0 else None):
            try:
                assert save(checkpointer, comm, 7) == [5, 6, 7], "its manifest went first"
                assert stuck.exists()
                assert save(checkpointer, comm, 8) == [6, 7, 8]
                assert checkpointer.restore(state(comm, 0), on_damage="older").step == 8
            finally:
                on_one(comm, lambda: immutable(stuck, False))
            save(checkpointer, comm, 9)
            assert not step_dir(root, 4).exists(), "the next writer finishes what was begun"
    assert not os.path.lexists(step_dir(root, 3))
