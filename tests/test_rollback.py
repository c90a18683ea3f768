"""Going back: to the right step, on all ranks, with what must be remembered, whatever dies on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mpi_ckpt.train.status import DIVERGED, FINISHED
from tests.launch import Launcher
from tests.training import all_finite, arrays, committed, events, losses, manifest, rows, same_end

FLAGS = "--ckpt-every", "5steps", "--steps", "16"
BATCH = 8  # samples a step of 2 ranks
ROLLBACK = "step", "target", "reason", "action", "rollbacks", "skipped"


def rollbacks(run_dir: Path) -> list[tuple]:
    return [tuple(event[name] for name in ROLLBACK) for event in events(run_dir, "rollback")]


def test_nan_on_one_rank_takes_all_ranks_back_and_skips_the_samples(launch):
    run = launch.cwd / "run"
    launch.train(3, "--run-dir", "run", *FLAGS, "--inject", "nan:8:2").check()
    assert rollbacks(run) == [(8, 5, "non-finite", "skip", 1, [[60, 96]])]  # steps 6, 7 and 8 of 12 samples each
    assert events(run, "skip") == [{"step": 6, "first": 60, "stop": 96}]
    assert manifest(run, 15)["meta"]["guard"]["skip"] == [[60, 96]]
    assert manifest(run, 15)["meta"]["cursor"] == 15 * 12 + 36
    assert all_finite(run)
    assert sorted(rows(run)) == list(range(1, 17))


def test_a_spike_is_gone_back_from_and_a_bad_checkpoint_too(launch):
    """The update of step 10 is bad, and committed; its loss shows at step 11."""
    run = launch.cwd / "run"
    launch.train(2, "--run-dir", "run", *FLAGS, "--inject", "lr-spike:10:1000").check()
    first, second = rollbacks(run)
    assert first == (11, 10, "spike", "skip", 1, [[80, 88]])
    assert second[:5] == (11, 5, "spike", "skip", 2), "the newest step was no help: one older"
    assert second[5] == [[40, 96]]
    assert rows(run)[16]["loss"] < rows(run)[5]["loss"] + 0.5


def test_lower_lr_trains_on_the_same_samples_with_half_the_learning_rate(launch):
    run = launch.cwd / "run"
    flags = *FLAGS, "--on-spike", "lower-lr", "--inject", "nan:8:0", "--inject", "nan:9:0"
    launch.train(2, "--run-dir", "run", *flags).check()
    assert rollbacks(run) == [(8, 5, "non-finite", "lower-lr", 1, []), (9, 5, "non-finite", "lower-lr", 2, [])]
    assert [rows(run)[s]["lr"] for s in (5, 6, 16)] == pytest.approx([3e-3, 3e-3 / 4, 3e-3 / 4], rel=1e-12)
    assert events(run, "skip") == []
    assert manifest(run, 16)["meta"]["cursor"] == 16 * BATCH


@pytest.mark.parametrize("flags", [["--on-spike", "stop"], ["--no-guard"], ["--max-rollbacks", "0"]])
def test_it_stops_where_it_may_not_go_back(launch, flags):
    outcome = launch.train(2, "--run-dir", "run", *FLAGS, "--inject", "nan:8:1", *flags)
    assert outcome.status == DIVERGED
    assert outcome.stderr.count("training diverged at step 8 (non-finite)") == 2, "every rank says so"
    assert flags[0] in outcome.stderr
    assert committed(launch.cwd / "run") == [5]
    if flags[0] == "--on-spike":  # the checkpoint is of before the step: the run can go on
        launch.train(2, "--run-dir", "run", *FLAGS).check()
        assert sorted(rows(launch.cwd / "run")) == list(range(1, 17))


def test_without_a_committed_step_it_begins_again_exactly(launch):
    run = launch.cwd / "run"
    noise = "--token-noise", "0.1"
    launch.train(2, "--run-dir", "run", *FLAGS, *noise, "--inject", "nan:1:1").check()
    assert rollbacks(run) == [(1, 0, "non-finite", "skip", 1, [[0, 8]])]
    launch.train(2, "--run-dir", "again", *FLAGS, *noise, "--inject", "nan:3:0").check()
    assert rollbacks(launch.cwd / "again") == [(3, 0, "non-finite", "skip", 1, [[0, 24]])]
    # Without a rollback, the first update is that of the same initial state and draws.
    launch.train(2, "--run-dir", "lower", *FLAGS, *noise, "--on-spike", "lower-lr", "--inject", "nan:3:0").check()
    launch.train(2, "--run-dir", "plain", *FLAGS, *noise, "--stop-at", "1").check()
    assert losses(launch.cwd / "lower")[1] == losses(launch.cwd / "plain")[1]


def test_what_comes_back_every_time_ends_with_a_clear_error_also_over_restarts(launch):
    """An update that overflows fp16 although its gradient is finite, at every step 1 that is tried."""
    run = launch.cwd / "run"
    flags = "--run-dir", "run", "--lr", "1e5", "--max-rollbacks", "2"
    outcome = launch.train(2, *flags)
    assert outcome.status == DIVERGED
    assert "2 rollbacks, as many as --max-rollbacks allows" in outcome.stderr
    assert [event[4] for event in rollbacks(run)] == [1, 2]
    assert (committed(run), all_finite(run)) == ([0], True)
    outcome = launch.train(2, *flags)  # the count is kept
    assert outcome.status == DIVERGED
    assert len(rollbacks(run)) == 2


def test_the_window_is_part_of_the_checkpoint(launch):
    """A spike right after a restart: without the losses of before it, nothing would be a spike."""
    run = launch.cwd / "run"
    launch.train(2, "--run-dir", "run", *FLAGS, "--stop-at", "6").check()
    launch.train(2, "--run-dir", "run", *FLAGS, "--inject", "lr-spike:7:1000").check()
    assert [event[:3] for event in rollbacks(run)] == [(8, 6, "spike")]


# Killed in the second rollback of a launch, which deletes step 10 and commits step 5 again.
TRIPS = "--inject", "nan:12:1", "--inject", "nan:14:0"
BEFORE_THE_INTENTION = "fsync rollback.json.tmp", "rename rollback.json"
AFTER_IT = (
    "unlink checkpoints/step_00000010/manifest.json",
    "unlink checkpoints/step_00000010/rank00000",
    "fsync checkpoints/step_00000005/rank00000",
    "rename checkpoints/step_00000005/manifest.json",
    "unlink checkpoints/step_00000005/rank00000",
    "unlink rollback.json",
)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Runs that go back once and twice, never killed."""
    launcher = Launcher(tmp_path_factory.mktemp("references"))
    stages = launcher.cwd / "stages"
    program = "-m", "tests.programs.training", "stages", str(stages), "--", "--run-dir"
    launcher(2, *program, "twice", *FLAGS, *TRIPS).check()
    launcher.train(2, "--run-dir", "once", *FLAGS, *TRIPS[:2]).check()
    assert [event[:2] for event in rollbacks(launcher.cwd / "twice")] == [(12, 10), (14, 5)]
    seen = stages.read_text().splitlines()
    for stage in BEFORE_THE_INTENTION + AFTER_IT:
        assert any(operation.startswith(stage) for operation in seen), stage
    return launcher.cwd


@pytest.mark.parametrize(
    ("rank", "stage"),
    [*((0, stage) for stage in BEFORE_THE_INTENTION + AFTER_IT), (1, "rename checkpoints/step_00000005/rank00001-")],
)
def test_killed_anywhere_in_a_rollback_the_next_launch_goes_on_from_it(launch, references, rank, stage):
    run = launch.cwd / "run"
    program = "-m", "tests.programs.training", "die", str(rank), stage, "--", "--run-dir", "run", *FLAGS
    killed = launch(2, *program, *TRIPS)
    assert killed.status not in (FINISHED, 1, DIVERGED), killed.stderr
    assert all_finite(run)
    launch.train(2, "--run-dir", "run", *FLAGS, *TRIPS).check()
    # Before there was an intention nothing had happened; the fault has fired, so the step is fine now.
    same_end(run, references / ("once" if stage in BEFORE_THE_INTENTION else "twice"), 16)
    assert not (run / "rollback.json").exists()


def test_a_step_chosen_by_hand_takes_the_place_of_an_unfinished_rollback(launch, references):
    run = launch.cwd / "run"
    shutil.copytree(references / "once", run)
    intention = {"step": 14, "reason": "spike", "action": "skip", "target": 10, "stop": 128, "lr_scale": 1.0}
    (run / "rollback.json").write_text(json.dumps(intention | {"rollbacks": 2, "skip": []}))
    launch.train(2, "--run-dir", "run", *FLAGS, "--resume", "15", "--discard-later").check()
    same_end(run, references / "once", 16)
    assert not (run / "rollback.json").exists()
    (run / "rollback.json").write_text("{")
    outcome = launch.train(2, "--run-dir", "run", *FLAGS)
    assert outcome.status == 2
    assert "rollback.json" in outcome.stderr


def test_a_rollback_goes_to_a_checkpoint_of_another_number_of_ranks(launch):
    run = launch.cwd / "run"
    launch.train(3, "--run-dir", "run", *FLAGS, "--stop-at", "5").check()
    launch.train(2, "--run-dir", "run", *FLAGS, "--elastic", "--inject", "nan:7:1").check()
    assert [event[:2] for event in rollbacks(run)] == [(7, 5)]
    assert all(len(array) == 30080 for array in arrays(run, 16).values())


def test_with_tensor_parallel_accumulation_and_a_restart_after_it_the_run_is_the_same(launch):
    flags = *FLAGS, "--tensor-parallel", "2", "--grad-accum", "2", "--token-noise", "0.1", "--inject", "nan:8:3"
    launch.train(4, "--run-dir", "whole", *flags).check()
    launch.train(4, "--run-dir", "parts", *flags, "--stop-at", "9").check()
    launch.train(4, "--run-dir", "parts", *flags).check()
    assert [event[:3] for event in rollbacks(launch.cwd / "parts")] == [(8, 5, "non-finite")]
    same_end(launch.cwd / "parts", launch.cwd / "whole", 16)
