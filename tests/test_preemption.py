"""Asked to leave, in whatever way: all ranks after the same step, one checkpoint, status 75; then on, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpi_ckpt.train.preemption import Clock
from mpi_ckpt.train.status import FINISHED, PREEMPTED
from tests.launch import HANG, ROOT, Job, Launcher, is_open_mpi
from tests.training import committed, events, lines, losses, rows, same_end, wait_for_step

RANKS = 3
STEPS = 400  # a second and a half: long enough to be asked in the middle
SETTINGS = "--token-noise", "0.1", "--grad-accum", "2"
FLAGS = "--run-dir", "run", "--steps", str(STEPS), "--ckpt-every", "150steps", *SETTINGS


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run, never interrupted."""
    launcher = Launcher(tmp_path_factory.mktemp("whole"))
    launcher.train(RANKS, *FLAGS).check()
    return launcher.cwd / "run"


def ask(job: Job, run_dir: Path, how: str) -> None:
    """In the way that `how` says: a signal to one rank, all ranks or the launcher, or the halt file."""
    if how == "halt":
        (run_dir / "halt").touch()
        return
    whom, name = how.split()
    ranks = job.ranks()
    assert len(ranks) == RANKS
    targets = {"one": [random.choice(ranks)], "all": ranks, "launcher": [job.process.pid]}[whom]
    for pid in targets:
        os.kill(pid, signal.Signals[name])


def check_left(outcome, run_dir: Path, reason: str) -> int:
    """It left in order, after one step for all; which."""
    assert outcome.status == PREEMPTED, outcome.stderr
    last = events(run_dir, "preemption")[-1]
    assert last["reason"] == reason
    assert committed(run_dir)[-1] == last["step"] == max(rows(run_dir))
    assert [event["step"] for event in events(run_dir, "commit")].count(last["step"]) == 1
    assert lines(run_dir)[-1]["event"] == "preemption"
    assert "Traceback" not in outcome.stderr
    return last["step"]


@pytest.mark.parametrize("how", ["one SIGUSR1", "all SIGUSR1", "launcher SIGUSR1", "one SIGTERM", "one SIGINT", "halt"])
def test_asked_at_a_random_moment_and_started_again_it_is_the_same_run(launch, whole, how):
    run = launch.cwd / "run"
    job = launch.start(RANKS, "-m", "mpi_ckpt.train", *FLAGS)
    wait_for_step(job, run, random.randrange(1, 20))
    ask(job, run, how)
    step = check_left(job.wait(), run, how.split()[-1])
    assert step < STEPS
    assert not (run / "halt").exists()
    launch.train(RANKS, *FLAGS).check()
    assert events(run, "launch")[1]["step"] == step
    same_end(run, whole, STEPS)


@pytest.mark.skipif(is_open_mpi(), reason="Open MPI's launcher does not pass SIGTERM and SIGINT on: it ends the job")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_mpich_passes_the_launchers_signals_on(launch, name):
    job = launch.start(RANKS, "-m", "mpi_ckpt.train", *FLAGS)
    wait_for_step(job, launch.cwd / "run", 3)
    ask(job, launch.cwd / "run", f"launcher {name}")
    check_left(job.wait(), launch.cwd / "run", name)


def test_asked_again_and_again_the_run_still_ends_the_same(launch, whole):
    run = launch.cwd / "run"
    for _ in range(4):
        job = launch.start(RANKS, "-m", "mpi_ckpt.train", *FLAGS)
        wait_until_it_takes_signals(job)
        time.sleep(random.uniform(0.0, 1.5))  # while it starts, restores, trains, or saves
        for pid in job.ranks()[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        status = job.wait().status
        assert status in (PREEMPTED, FINISHED)
        if status == FINISHED:
            break
    launch.train(RANKS, *FLAGS).check()
    same_end(run, whole, STEPS)


def test_before_the_first_step_it_leaves_without_a_checkpoint(launch):
    run = launch.cwd / "run"
    job = launch.start(RANKS, "-m", "mpi_ckpt.train", *FLAGS)
    wait_until_it_takes_signals(job)
    os.kill(random.choice(job.ranks()), signal.SIGUSR1)
    outcome = job.wait()
    assert outcome.status == PREEMPTED, outcome.stderr
    assert rows(run) == {}
    assert committed(run) == []
    assert events(run, "preemption") == [{"step": 0, "reason": "SIGUSR1"}]


def test_asked_when_it_is_over_it_is_finished(launch):
    job = launch.start(2, "-m", "mpi_ckpt.train", "--run-dir", "run", "--steps", "2")
    wait_until_it_takes_signals(job, 2)
    while job.process.poll() is None:  # to its very end, which Python spends in giving signals back their default
        for pid in job.ranks() if "resume verified" in job.output() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.002)
    assert job.wait().status == FINISHED


def wait_until_it_takes_signals(job: Job, many: int = RANKS) -> None:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        ranks = job.ranks()
        if len(ranks) == many and all(map(takes_signals, ranks)):
            return
        time.sleep(0.001)
    raise AssertionError(job.output())


def takes_signals(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1, see proc(5)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


@pytest.mark.parametrize("second", [signal.SIGUSR1, signal.SIGTERM])
def test_a_second_signal_ends_the_job_within_seconds_though_a_rank_hangs(launch, second):
    job = launch.start(RANKS, "-m", "mpi_ckpt.train", *FLAGS, "--inject", "hang:10:1")
    wait_for_step(job, launch.cwd / "run", 9)
    victim = job.ranks()[0]
    os.kill(victim, signal.SIGUSR1)
    time.sleep(1)
    assert job.process.poll() is None, "one signal waits for the boundary of the step"
    began = time.monotonic()
    os.kill(victim, second)
    outcome = job.wait()
    assert time.monotonic() - began < 30
    assert outcome.status not in (FINISHED, PREEMPTED)


def test_a_halt_file_of_the_last_launch_stops_nothing(launch):
    run = launch.cwd / "run"
    launch.train(RANKS, *FLAGS, "--stop-at", "5").check()
    (run / "halt").touch()
    launch.train(RANKS, *FLAGS, "--stop-at", "10").check()
    assert not (run / "halt").exists()


def test_asked_after_the_last_step_the_run_is_finished(launch):
    """A signal while the results are checked: nothing is left to do, so nothing has to be started again."""
    job = launch.start(1, "-m", "mpi_ckpt.train", *FLAGS, "--stop-at", "30")
    wait_for_step(job, launch.cwd / "run", 30)
    for pid in job.ranks():
        os.kill(pid, signal.SIGTERM)
    assert job.wait().status == FINISHED
    assert [event["reason"] for event in events(launch.cwd / "run", "finish")] == ["stop-at"]


@pytest.mark.parametrize("source", ["--time-limit", "SLURM_JOB_END_TIME"])
def test_it_leaves_before_its_time_is_over(launch, source):
    seconds, run = 9, launch.cwd / "run"
    flags = ("--time-limit", f"{seconds}s") if source == "--time-limit" else ()
    env = {} if flags else {"SLURM_JOB_END_TIME": str(int(time.time()) + seconds)}
    steps = "--run-dir", "run", "--steps", "1000000", "--ckpt-every", "1000000steps"
    outcome = launch.train(RANKS, *steps, *flags, env=env)
    check_left(outcome, run, "time-limit")
    began, left = lines(run)[0]["time"], lines(run)[-1]["time"]
    assert left < (began + seconds if flags else int(env["SLURM_JOB_END_TIME"]))
    assert outcome.seconds > 2, "not at once"


@pytest.mark.parametrize("rank", [0, 1])
def test_one_clock_decides_for_all(launch, rank):
    """The clocks of a rank jump a year ahead while it trains: rank 0's decides, anyone else's does not matter."""
    program = "-m", "tests.programs.training", "skew", str(rank), "31536000", "--"
    flags = "--run-dir", "run", "--time-limit", "10h", "--ckpt-every", "1d", "--steps", "1000000", "--stop-at", "300"
    outcome = launch(2, *program, *flags)
    assert outcome.status == (PREEMPTED if rank == 0 else FINISHED), outcome.stderr
    assert len(committed(launch.cwd / "run")) >= 1


def test_the_margin_is_twice_the_longest_save_and_step():
    clock = Clock(1000.0, {})
    assert (clock.margin, clock.is_up()) == (120.0, False)  # no save was measured: 60 s
    clock.committed(7.0)
    clock.committed(4.0)
    clock.stepped(0.5)
    assert clock.margin == 15.0
    clock.committed(500.0)
    assert clock.is_up()
    assert Clock(100.0, {}).margin == 20.0  # no save was measured: a tenth of the time
    assert not Clock(None, {}).is_up()
    assert Clock(None, {"SLURM_JOB_END_TIME": str(time.time() - 1)}).is_up()
    assert not Clock(None, {"SLURM_JOB_END_TIME": "soon"}).is_up()


def test_signals_are_taken_before_the_slow_imports():
    program = "import sys; from mpi_ckpt.train import __main__; print('numpy' in sys.modules, 'mpi4py' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_evaluation_is_no_obstacle(launch):
    run = launch.cwd / "run"
    flags = *FLAGS, "--eval-every", "1", "--eval-samples", "512"
    job = launch.start(RANKS, "-m", "mpi_ckpt.train", *flags)
    wait_for_step(job, run, 5)
    ask(job, run, "one SIGUSR1")
    step = check_left(job.wait(), run, "SIGUSR1")
    assert max(event["step"] for event in events(run, "evaluation")) == step
    assert len(losses(run)) == step
