"""Exit statuses: one table, the same for every rank, and nothing that a launcher's arithmetic can hide."""

from __future__ import annotations

import itertools
import pickle
import shutil
from pathlib import Path

import pytest

from mpi_ckpt import errors
from mpi_ckpt.checkpoint import commit
from mpi_ckpt.train import status
from mpi_ckpt.train.config import ConfigError
from mpi_ckpt.train.guard import Diverged
from tests.launch import Launcher

KILLED = 9  # of the ranks that an abort ends, under MPICH


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 4 steps on 2 ranks."""
    launcher = Launcher(tmp_path_factory.mktemp("finished"))
    launcher.train(2, "--run-dir", "run", "--steps", "4", "--ckpt-every", "2steps").check()
    return launcher.cwd / "run"


def test_they_survive_a_launcher_that_combines_them_bit_by_bit():
    own = [status.DIVERGED, status.PREEMPTED, status.HUNG, status.DAMAGED]
    assert len(set(own)) == 4
    for one in own:
        assert one | KILLED == one
    assert all(one != other for one, other in itertools.combinations(own, 2))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("x"), status.USAGE),
        (errors.WorldSizeMismatch("x"), status.USAGE),
        (errors.UnknownSchema("x"), status.USAGE),  # an InvalidManifest, but nothing is damaged
        (Diverged("x"), status.DIVERGED),
        (errors.RankSilent("x"), status.HUNG),
        (errors.CorruptShard("x"), status.DAMAGED),
        (errors.MissingShard("x"), status.DAMAGED),
        (errors.InvalidManifest("x"), status.DAMAGED),
        (errors.NoCheckpoint("x"), status.DAMAGED),
        (errors.LayoutMismatch("x"), status.USAGE),
        (errors.UnusableOption("x"), status.USAGE),
        (errors.RemoteRefused("x"), status.USAGE),  # what only the user can change
        (errors.RemoteFailed("x"), status.FAILED),
        (errors.SaveFailed("x"), status.FAILED),
        (errors.DirectoryInUse("x"), status.FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_status(error, expected):
    assert status.of(error) == expected


def test_a_run_that_is_done_is_finished_again(finished, launch):
    shutil.copytree(finished, launch.cwd / "run")
    assert launch.train(2, "--run-dir", "run", "--ckpt-every", "2steps").status == status.FINISHED


@pytest.mark.parametrize(
    "flags", [["--no-such-flag"], ["--lr", "7"], ["--ckpt-every", "soon"], ["--time-limit", "1"], ["--resume", "3"]]
)
def test_what_the_same_line_cannot_mend_is_usage(finished, launch, flags):
    shutil.copytree(finished, launch.cwd / "run")
    assert launch.train(2, "--run-dir", "run", "--steps", "6", *flags).status == status.USAGE


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (["--redundancy", "xor"], "--local"),
        (["--local-keep", "2"], "--local"),
        (["--shared-every", "10"], "--local"),
        (["--remote-keep", "2"], "--remote"),
        (["--remote-bandwidth", "50MB"], "--remote"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_flag_of_a_tier_that_is_not_there_is_usage_and_names_what_is_missing(launch, flags, missing):
    """With the value that is the default too: whoever gives it expects the tier."""
    outcome = launch.train(1, "--run-dir", "run", *flags)
    assert outcome.status == status.USAGE, outcome
    assert f"{flags[0][2:].replace('-', '_')} cannot be used" in outcome.stderr
    assert f"expected {missing} beside it" in outcome.stderr
    assert not (launch.cwd / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--local", "nodes", "--redundancy", "raid5"], "no such scheme of redundancy; found 'raid5'"),
        (["--local", "nodes", "--redundancy", "rs:0+1"], "no such scheme"),
        (["--local", "."], "would lie among those of the run's directory"),
        (["--local", "nodes"], "`local` is the same directory for several failure domains"),
        (["--remote", "file:///nowhere", "--remote-bandwidth", "fast"], "remote_bandwidth: found 'fast'"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_tiers_that_cannot_be_used_as_they_were_asked_for_are_usage(launch, flags, said):
    outcome = launch.train(2, "--run-dir", "run", *flags, env={"MPI_CKPT_DOMAIN": "node{rank}"})
    assert outcome.status == status.USAGE, outcome
    assert said in outcome.stderr
    assert not list(launch.cwd.rglob("step_*"))


def test_the_nodes_are_not_the_run_s_own_checkpoints(launch):
    outcome = launch.train(1, "--run-dir", "x/checkpoints", "--local", "x/checkpoints")
    assert outcome.status == status.USAGE, outcome
    assert "among those of the run's directory" in outcome.stderr


def test_another_number_of_ranks_is_usage(finished, launch):
    shutil.copytree(finished, launch.cwd / "run")
    assert launch.train(3, "--run-dir", "run", "--steps", "6").status == status.USAGE


@pytest.mark.parametrize("damaged", [["step_00000004"], ["step_00000002", "step_00000004"]])
def test_damage_has_its_own_status_until_an_older_step_may_be_taken(finished, launch, damaged):
    shutil.copytree(finished, launch.cwd / "run")
    for step in damaged:
        (launch.cwd / "run" / "checkpoints" / step / "rank00001.h5").unlink()
    flags = "--run-dir", "run", "--steps", "6"
    assert launch.train(2, *flags).status == status.DAMAGED
    older = launch.train(2, *flags, "--on-damage", "older").status
    assert older == (status.FINISHED if len(damaged) == 1 else status.DAMAGED)


@pytest.mark.parametrize("kind", [errors.SaveFailed, errors.OutcomeUnknown])
def test_a_save_that_failed_because_a_rank_was_silent_is_a_hang(kind):
    """Whoever turns the error into another keeps who was silent: both tiers' commits do it in one place."""
    silence = errors.RankSilent("no word from rank 0", rank=0)
    silence.silent = (0,)
    place = commit.Place(Path("rank00001.h5"), Path("rank00001.h5.tmp"), None, replaces=False)
    assert status.of(commit.outcome_unknown(place, silence)) == status.HUNG
    error = pickle.loads(pickle.dumps(kind("no word from rank 3")))
    assert status.of(error) == status.FAILED
    error.silent = (3,)
    assert status.of(pickle.loads(pickle.dumps(error))) == status.HUNG, "errors travel between ranks"
