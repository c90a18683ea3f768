"""Resumed is not restarted: losses, rates, evaluations, noise and samples are those of the run that never stopped."""

from __future__ import annotations

import json
import shutil
from itertools import chain, product
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpi_ckpt import Checkpointer
from mpi_ckpt.train.config import ConfigError, Settings, resolve
from mpi_ckpt.train.data import open_dataset
from mpi_ckpt.train.trainer import Trainer
from tests.test_train import arrays, events, losses, rows

OLD_RUN = Path(__file__).parent / "golden" / "old_run"
EVERYTHING = (
    *("--grad-accum", "3", "--token-noise", "0.1", "--clip-norm", "1.2", "--global-batch", "13"),
    *("--lr-schedule", "cosine", "--warmup-steps", "3", "--eval-every", "2", "--eval-samples", "10"),
)


def rates(run_dir: Path) -> list[float]:
    return [row["lr"] for row in rows(run_dir).values()]


def evaluations(run_dir: Path) -> dict[int, str]:
    """The last evaluation after each step."""
    return {event["step"]: event["eval_loss"].hex() for event in events(run_dir, "evaluation")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """10 steps on 3 ranks with everything on, never interrupted."""
    from tests.launch import Launcher

    cwd = tmp_path_factory.mktemp("whole")
    Launcher(cwd).train(3, "--run-dir", "run", "--steps", "10", "--ckpt-every", "2steps", *EVERYTHING).check()
    return cwd / "run"


@pytest.mark.parametrize("async_io", ["--async-io", "--no-async-io"])
def test_ten_steps_are_four_and_a_resume_and_six_with_everything_on(whole, launch, async_io):
    """The second launch is told how often to evaluate, and takes the mathematics from the first."""
    launch.train(3, "--run-dir", "run", "--steps", "10", "--stop-at", "4", async_io, *EVERYTHING).check()
    run = launch.cwd / "run"
    launch.train(3, "--run-dir", "run", "--steps", "10", "--eval-every", "2", async_io).check()
    assert rates(run) == rates(whole)
    assert len(set(rates(run))) == 10
    assert losses(run) == losses(whole)
    assert evaluations(run) == evaluations(whole)
    assert list(evaluations(run)) == [2, 4, 6, 8, 10]
    assert arrays(run, 10) == arrays(whole, 10)


def test_evaluating_does_not_change_the_run_and_more_steps_do_not_move_the_cosine(whole, launch):
    """Held out is the same, but nothing is evaluated before the end of each launch; and the run is made longer."""
    quiet = [flag for flag in EVERYTHING if flag not in ("--eval-every", "2")]
    launch.train(3, "--run-dir", "run", "--steps", "10", "--stop-at", "7", *quiet).check()
    launch.train(3, "--run-dir", "run", "--steps", "13").check()
    run = launch.cwd / "run"
    assert list(evaluations(run)) == [7, 13]
    assert {step: losses(run)[step] for step in range(1, 11)} == losses(whole)
    assert rates(run)[:10] == rates(whole)
    assert set(rates(run)[9:]) == {3e-3 / 10}  # at the end of the cosine from the tenth step on
    assert json.loads((run / "run.json").read_text())["settings"]["lr_decay_steps"] == 10


def test_the_mathematics_belongs_to_the_run(launch):
    stored = Settings(lr_schedule="cosine", warmup_steps=3, grad_accum=3, eval_samples=10).completed(10, evaluates=True)
    same = {"lr_decay_steps": 10, "grad_accum": 3, "eval_samples": 10, "decay": "matrices", "lr_schedule": "cosine"}
    assert resolve(same, stored, 3) == stored
    others = {"grad_accum": 2, "warmup_steps": 4, "lr_decay_steps": 12, "clip_norm": 2.0, "decay": "all", "lr_min": 0.0}
    for name, value in (others | {"lr_schedule": "constant", "eval_samples": 11}).items():
        with pytest.raises(ConfigError, match=f"{name} is not what this run was started with"):
            resolve({name: value}, stored, 3)
    launch.train(3, "--run-dir", "plain", "--steps", "2").check()
    outcome = launch.train(3, "--run-dir", "plain", "--steps", "4", "--eval-every", "1")
    assert outcome.status != 0
    assert "this run holds no samples out" in outcome.stderr


def test_a_run_of_before_these_settings_goes_on_as_it_began(launch):
    """4 steps of a run that a program without schedules and decay groups wrote, and 8 that it went on with."""
    run = launch.cwd / "run"
    shutil.copytree(OLD_RUN, run)
    launch.train(2, "--run-dir", "run").check()
    known = [json.loads(line) for line in (OLD_RUN / "metrics_to_step_12.jsonl").read_text().splitlines()]
    expected = {row["step"]: row["loss"] for row in known if "loss" in row and row["step"] > 4}
    found = {step: row["loss"] for step, row in rows(run).items()}
    assert list(found) == list(range(5, 13))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_4_then_2_then_3_ranks_have_the_losses_of_the_uninterrupted_run_over_40_steps(launch):
    steps = "--steps", "40", "--ckpt-every", "1000steps"
    launch.train(4, "--run-dir", "whole", *steps).check()
    launch.train(4, "--run-dir", "run", *steps, "--stop-at", "13").check()
    launch.train(2, "--run-dir", "run", *steps, "--stop-at", "27", "--elastic").check()
    launch.train(3, "--run-dir", "run", *steps, "--elastic").check()
    mine, theirs = ([row["loss"] for row in rows(launch.cwd / name).values()] for name in ("run", "whole"))
    assert len(mine) == len(theirs) == 40
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)


@pytest.mark.parametrize(
    ("samples", "global_batch", "save_every", "launches"),
    [
        (101, 7, 5, [(4, 17), (3, 29), (6, 44)]),  # nothing divides; two resumes repeat the steps after the last save
        (20, 5, 4, [(2, 4), (2, 8), (2, 12)]),  # every save is exactly at the end of an epoch
    ],
)
def test_every_sample_comes_once_an_epoch_over_three_epochs(launch, samples, global_batch, save_every, launches):
    (launch.cwd / "run").mkdir()
    taken: dict[int, list[int]] = {}
    for ranks, stop in launches:
        arguments = "run", samples, global_batch, save_every, stop
        launch(ranks, "-m", "tests.programs.samples", *map(str, arguments)).check()
        lines = {}
        for note in sorted((launch.cwd / "run").glob("ids-*.jsonl")):
            for line in map(json.loads, note.read_text().splitlines()):
                lines[line["step"], line["rank"]] = line["ids"]
            note.unlink()
        for step in sorted({step for step, _ in lines}):
            again = list(chain(*(lines[step, rank] for rank in range(ranks))))
            assert taken.get(step, again) == again  # a repeated step takes the same samples, on any number of ranks
            taken[step] = again
    assert list(taken) == list(range(1, launches[-1][1] + 1))
    ids = list(chain(*taken.values()))
    for epoch in range(3):
        assert sorted(ids[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def content(path: Path) -> dict[str, bytes]:
    """Every data set of a shard; only the id of its save, an attribute, is not among them."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()].tobytes()} if hasattr(item, "dtype") else {}))
    return found


def trainer_on(comm) -> Trainer:
    settings = Settings(token_noise=0.2, grad_accum=2, global_batch=9)
    model = settings.model
    return Trainer.build(comm, settings, open_dataset(None, model.seq_len, 0, vocab_size=64, total_tokens=4000))


@pytest.mark.mpi(ranks=[1, 3], timeout=60, unit="s")
def test_a_save_right_after_a_restore_holds_what_was_restored_and_every_rank_has_its_stream_back(comm, shared_path):
    trainer = trainer_on(comm)
    for _ in range(3):
        trainer.step()
    with Checkpointer(shared_path / "a", comm) as first, Checkpointer(shared_path / "b", comm) as second:
        first.save(3, trainer.state)
        first.wait_until_finished()
        resumed = trainer_on(comm)
        assert first.restore(resumed.state).step == 3
        resumed.restored()
        second.save(3, resumed.state)
        second.wait_until_finished()
    one, other = (content(shared_path / name / "step_00000003" / f"rank{comm.rank:05d}.h5") for name in "ab")
    assert one == other
    assert len(one) == 6  # arrays/param, arrays/master, arrays/m, arrays/v, values and crc32c
    draws = [t.rng.integers(2**63, size=8).tolist() for t in (trainer, resumed)]
    assert draws[0] == draws[1]
    by_rank = comm.allgather(draws[0])
    assert all(by_rank[a] != by_rank[b] for a, b in product(range(comm.size), repeat=2) if a != b)
