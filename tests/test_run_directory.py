"""A run's directory: what a launch finds in it decides what it may do, and what it cannot do it refuses at once."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from mpi_ckpt import CheckpointError, cli
from mpi_ckpt.checkpoint.checkpointer import Checkpointer
from mpi_ckpt.train.metrics import MetricsFailed, MetricsLog
from tests.checkpoints import flip, raised
from tests.launch import Launcher
from tests.training import events

RANKS = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The directory of a finished run."""
    cwd = tmp_path_factory.mktemp("reference")
    Launcher(cwd).train(RANKS, "--run-dir", "run").check()
    return cwd / "run"


def test_settings_belong_to_the_run_before_anything_is_committed_too(launch):
    killed = launch.train(RANKS, "--run-dir", "run", "--ckpt-every", "100steps", "--inject", "kill:8:1")
    assert killed.status != 0
    again = launch.train(RANKS, "--run-dir", "run", "--seed", "1")
    assert again.status == 2
    assert "seed is not what this run was started with" in again.stderr
    launch.train(1, "--run-dir", "run", "--elastic", "--stop-at", "2").check()
    assert json.loads((launch.cwd / "run" / "run.json").read_text())["settings"]["global_batch"] == 8


def test_what_a_launch_cannot_do_is_refused_before_anything_is_made(launch):
    for flags in (["--n-head", "5"], ["--resume", "5"], ["--tensor-parallel", "2", "--n-head", "1"], ["--data", "no"]):
        outcome = launch.train(RANKS, "--run-dir", "run", *flags)
        assert outcome.status == 2, outcome.stderr
        assert not (launch.cwd / "run").exists(), flags
    outcome = launch.train(1, "--run-dir", "run", "--discard-later")
    assert outcome.status == 2
    assert "--resume STEP" in outcome.stderr


def test_a_run_is_not_shortened_to_before_its_newest_step(reference, launch):
    shutil.copytree(reference, launch.cwd / "run")
    outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "15")
    assert outcome.status == 2
    assert "found --steps 15, and step 20 is committed" in outcome.stderr
    assert json.loads((launch.cwd / "run" / "run.json").read_text())["steps"] == 20


def test_what_reshard_writes_the_trainer_takes_as_its_own_and_a_bare_root_it_refuses(reference, launch):
    run = launch.cwd / "run"
    assert cli.main(["reshard", str(reference), "--ranks", "3", "--out", str(run / "checkpoints")]) == 0
    shutil.copy(reference / "run.json", run)
    launch.train(3, "--run-dir", "run", "--steps", "22").check()
    bare = launch.cwd / "bare"
    assert cli.main(["reshard", str(reference), "--ranks", "3", "--out", str(bare)]) == 0
    outcome = launch.train(3, "--run-dir", "bare")
    assert outcome.status == 2
    assert "a root of checkpoints, not a run's directory" in outcome.stderr


def test_going_on_from_an_older_step_leaves_an_event(reference, launch):
    run = shutil.copytree(reference, launch.cwd / "run")
    flip(run / "checkpoints" / "step_00000020" / "rank00001.h5", -1)
    launch.train(RANKS, "--run-dir", "run", "--steps", "21", "--on-damage", "older").check()
    damage = events(run, "damage")
    assert [event["step"] for event in damage] == [20]
    assert "rank00001.h5" in damage[0]["error"]


def test_a_log_that_cannot_be_written_says_where_and_leaves_no_half_line(tmp_path, monkeypatch):
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1})
        genuine = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: genuine(fd, data[:5]))  # a disk that is nearly full
        with pytest.raises(MetricsFailed, match="No space left") as caught:
            log.write({"step": 2})
        monkeypatch.undo()
        assert caught.value.path == str(tmp_path / "metrics.jsonl")
        log.write({"step": 3})
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 3]


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_that_cannot_be_discarded_is_an_error_for_a_restart_would_take_it(comm, shared_path, monkeypatch):
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"n": step})
        checkpointer.wait_until_finished()
        genuine = os.unlink

        def denied(path, *args, **kwargs):
            if str(path).endswith("step_00000003/manifest.json"):
                raise PermissionError(13, "Permission denied", str(path))
            return genuine(path, *args, **kwargs)

        monkeypatch.setattr(os, "unlink", denied)
        error = raised(comm, CheckpointError, lambda: checkpointer.discard_after(1))
        assert "step 3 cannot be deleted" in str(error)
        monkeypatch.undo()
        assert checkpointer.all_steps() == [1, 2, 3], "the highest first: no lower one is gone yet"
        assert checkpointer.discard_after(1) == [3, 2]
        assert checkpointer.all_steps() == [1]
