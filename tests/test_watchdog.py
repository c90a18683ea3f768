"""A rank without progress ends the job in about the time-out, with its own status and the stacks of all threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mpi_ckpt.train.config import ConfigError, Options
from mpi_ckpt.train.status import HUNG
from tests.launch import HANG, ROOT
from tests.training import events, rows, same_end

FLAGS = "--run-dir", "run", "--ckpt-every", "5steps", "--steps", "12", "--hang-timeout"
TIMEOUT = 4.0  # above what a busy machine needs for one step
PATIENCE = 60.0  # seconds for start, end, and being late by a tenth, on a slow machine


def check_hang(outcome) -> None:
    assert outcome.status == HUNG, outcome.stderr
    assert outcome.seconds < TIMEOUT + PATIENCE
    assert "Timeout (0:00:04)!" in outcome.stderr


def test_a_rank_that_stops_ends_the_job_and_the_next_launch_goes_on(launch):
    flags = *FLAGS, str(TIMEOUT), "--inject", "hang:8:1"
    outcome = launch.train(3, *flags)
    check_hang(outcome)
    assert f"[rank 1] hang: no progress for {TIMEOUT:g} s" in outcome.stderr
    assert "in strike" in outcome.stderr, "where the rank hangs"
    assert "in reduce_scatter_sum" in outcome.stderr, "where the others wait for it"
    hang = events(launch.cwd / "run", "hang")
    assert hang == [{"step": 7, "seconds": TIMEOUT}]
    launch.train(3, *flags).check()
    launch.train(3, "--run-dir", "whole", *FLAGS[2:], "0").check()
    same_end(launch.cwd / "run", launch.cwd / "whole", 12)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_holds_the_interpreter_lock_ends_the_job(launch, rank):
    outcome = launch(2, "-m", "tests.programs.training", "spin", "8", str(rank), "--", *FLAGS, str(TIMEOUT))
    check_hang(outcome)
    assert "in gradients" in outcome.stderr
    assert max(rows(launch.cwd / "run")) == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_frozen_at_the_decision_to_save_ends_the_job(launch, rank):
    """The others wait for it in a collective, which is no save."""
    flags = "--run-dir", "run", "--steps", "12", "--ckpt-every", "1000s", "--hang-timeout", str(TIMEOUT)
    check_hang(launch(3, "-m", "tests.programs.training", "freeze", "5", str(rank), "--", *flags))


def test_the_only_rank_watches_itself_too(launch):
    check_hang(launch(1, "-m", "tests.programs.training", "spin", "8", "0", "--", *FLAGS, str(TIMEOUT)))


def watched(*lines: str) -> subprocess.CompletedProcess[str]:
    """A process with a watchdog of 1 s that does these lines."""
    imports = "import time", "from mpi4py import MPI", "from mpi_ckpt.train.watchdog import Watchdog"
    program = *imports, "dog = Watchdog(1.0, MPI.COMM_WORLD)", *lines
    command = [sys.executable, "-c", "\n".join(program)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)


def test_an_end_that_waits_for_its_uploads_is_not_hung(launch):
    far = "--remote", f"file://{launch.cwd}/far", "--remote-bandwidth", "30KB"  # some ten seconds
    launch.train(2, "--run-dir", "run", "--ckpt-every", "20steps", *far, "--hang-timeout", str(TIMEOUT)).check()
    assert (launch.cwd / "far" / "step_00000020" / "upload_manifest.json").exists()


def test_slow_is_not_hung():
    """As long as it goes on, however many times the time-out passes."""
    assert watched("for _ in range(10): time.sleep(0.3), dog.beat()").returncode == 0
    assert watched("with dog.engine():", "    for _ in range(3000): time.sleep(0.001)").returncode == 0  # it polls
    assert watched("dog.close()", "time.sleep(3)").returncode == 0


@pytest.mark.parametrize(
    "lines", [["with dog.engine(): time.sleep(99)"], ["with dog.engine(): pass", "time.sleep(99)"]], ids=["in", "after"]
)
def test_what_is_stuck_in_a_save_or_after_it_is_hung(lines):
    hung = watched(*lines)
    assert hung.returncode == HUNG
    assert "[rank 0] hang: no progress for 1 s" in hung.stderr


def test_the_time_out_is_a_duration_or_a_number_of_seconds():
    assert [Options(hang_timeout=text).hang_seconds for text in ("10min", "90", "2.5", "0", "2h")] == [
        600.0, 90.0, 2.5, 0.0, 7200.0,
    ]  # fmt: skip
    assert Options().hang_seconds == 1800.0
    for text in ("", "soon", "-1", "1.5.2", "10 minutes", "nan"):
        with pytest.raises(ConfigError, match="hang_timeout"):
            Options(hang_timeout=text)
