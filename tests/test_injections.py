"""Faults on purpose: they hit the step and the rank that they name, and only once a run."""

from __future__ import annotations

import pytest

from mpi_ckpt.train.config import ConfigError, Options
from tests.launch import Launcher
from tests.training import events, losses, rows, same_end

FLAGS = "--run-dir", "run", "--ckpt-every", "5steps", "--steps", "14"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run without a fault."""
    launcher = Launcher(tmp_path_factory.mktemp("whole"))
    launcher.train(2, *FLAGS).check()
    return launcher.cwd / "run"


@pytest.mark.parametrize(
    "text",
    ["", "nan", "nan:1", "nan:0:1", "nan:x:1", "nan:1:-1", "nan:1:x", "nan:1:0:2", "boom:1:1", "kill:1:",
     "lr-spike:3:0", "lr-spike:3:nan", "lr-spike:3:inf", "lr-spike:3", "hang:1.5:0", "../nan:1:1"],
)  # fmt: skip
def test_what_is_not_a_fault_is_refused(text):
    with pytest.raises(ConfigError, match="expected lr-spike:STEP:FACTOR"):
        Options(inject=[text])


def test_a_rank_that_is_not_there_is_bad_usage(launch):
    outcome = launch.train(2, *FLAGS, "--inject", "nan:3:2")
    assert outcome.status == 2
    assert "found rank 2" in outcome.stderr


def test_a_killed_rank_is_killed_once(launch, whole):
    killed = launch.train(2, *FLAGS, "--inject", "kill:8:1")
    assert killed.status not in (0, 1, 2, 73, 75, 77, 79)
    assert max(rows(launch.cwd / "run")) == 7
    launch.train(2, *FLAGS, "--inject", "kill:8:1").check()
    same_end(launch.cwd / "run", whole, 14)
    assert events(launch.cwd / "run", "injection") == [{"step": 8, "kind": "kill", "rank": 1}]


def test_a_spike_of_the_learning_rate_lasts_one_step(launch, whole):
    launch.train(2, *FLAGS, "--inject", "lr-spike:7:3", "--no-guard").check()
    run = launch.cwd / "run"
    assert [rows(run)[step]["lr"] for step in (6, 7, 8)] == pytest.approx([3e-3, 9e-3, 3e-3], rel=1e-12)
    ours, plain = losses(run), losses(whole)
    assert [ours[s] == plain[s] for s in (6, 7, 8)] == [True, True, False]


def test_a_fault_does_not_fire_again_after_the_rollback_that_it_caused(launch):
    run = launch.cwd / "run"
    launch.train(2, *FLAGS, "--inject", "nan:8:1", "--inject", "nan:13:0").check()
    assert [(e["step"], e["target"]) for e in events(run, "rollback")] == [(8, 5), (13, 10)]
    assert [(e["step"], e["rank"]) for e in events(run, "injection")] == [(8, 1), (13, 0)]
