"""jobs/local.sh on this machine, the decision that it shares with train.sbatch, and what can be said of all scripts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_ckpt import errors
from mpi_ckpt.storage import names
from mpi_ckpt.train import metrics, status
from mpi_ckpt.train.metrics import MetricsLog
from tests.launch import HANG, ROOT, Job, mpirun
from tests.slurm import eventually

JOBS = ROOT / "jobs"


class Local:
    """`jobs/local.sh`, started in a directory of its own."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.run_dir = cwd / "run"
        self._jobs: list[Job] = []

    def start(self, *train: str, **knobs: str) -> Job:
        path = os.pathsep.join([os.path.dirname(mpirun()), os.path.dirname(sys.executable), os.environ["PATH"]])
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        fixed = {"RANKS": "2", "RUN_DIR": str(self.run_dir), "CKPT_EVERY": "50steps", "PATH": path, "PAUSE": "0"}
        env = {**os.environ, "PYTHONPATH": python_path, **fixed, **knobs}
        job = Job(["bash", str(JOBS / "local.sh"), *train], self.cwd, env)
        self._jobs.append(job)
        return job

    def newest(self) -> int:
        return max(names.list_steps(self.run_dir / "checkpoints"), default=0)

    def losses(self) -> dict[int, float]:
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["loss"] for row in rows if "loss" in row and "event" not in row}

    def end_all(self) -> None:
        for job in self._jobs:
            job.end()


@pytest.fixture
def local(tmp_path) -> Iterator[Local]:
    one = Local(tmp_path)
    yield one
    one.end_all()


def ranks_of(job: Job) -> list[int]:
    return [pid for pid in job.ranks() if b"mpi_ckpt.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_run_that_is_finished_is_not_launched_again(local):
    outcome = local.start("--steps", "3").wait()
    assert outcome.status == status.FINISHED, outcome
    assert outcome.stdout.count("[job] status") == 1
    assert local.newest() == 3


def test_a_killed_rank_is_launched_again_and_the_losses_are_those_of_a_run_that_was_not(local, launch):
    train = ("--steps", "400", "--lr", "1e-3")
    launch.train(2, "--run-dir", "whole", "--ckpt-every", "50steps", *train).check()
    job = local.start(*train)
    eventually(lambda: local.newest() > 0, HANG, job.output)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    outcome = job.wait()
    assert outcome.status == status.FINISHED, outcome
    assert outcome.stdout.count("[job] status") == 2
    whole = Local(local.cwd)
    whole.run_dir = local.cwd / "whole"
    assert local.losses() == whole.losses()


def test_launches_without_progress_end_after_the_bounded_tries(local):
    (local.run_dir / "checkpoints").mkdir(parents=True)
    with (local.run_dir / "checkpoints/writer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another writer: every launch fails
        outcome = local.start("--steps", "3", MAX_LAUNCHES="2").wait()
    assert outcome.status == status.FAILED, outcome
    assert outcome.stdout.count(f"[job] status {status.FAILED} at step 0: again") == 1
    assert outcome.stdout.count(f"[job] status {status.FAILED} at step 0: give-up") == 1


def test_a_usage_error_is_not_launched_again(local):
    outcome = local.start("--lr", "-1").wait()
    assert outcome.status == status.USAGE, outcome
    assert outcome.stdout.count("[job] status") == 1


def test_a_divergence_is_not_launched_again(local):
    outcome = local.start("--steps", "40", "--on-spike", "stop", "--inject", "nan:10:1").wait()
    assert outcome.status == status.DIVERGED, outcome
    assert outcome.stdout.count("[job] status") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_leave_it_checkpoints_once_and_is_not_launched_again(local, number):
    job = local.start("--steps", "100000", "--lr", "1e-3")
    eventually(lambda: local.newest() > 0, HANG, job.output)
    os.kill(job.process.pid, number)
    outcome = job.wait()
    assert outcome.status == status.PREEMPTED, outcome
    assert outcome.stdout.count("[job] status") == 1
    assert f"[job] status {status.PREEMPTED} at step {local.newest()}: asked to leave" in outcome.stdout
    assert local.newest() == max(local.losses())


def test_the_pause_after_a_launch_without_progress_ends_when_asked_to_leave(local):
    (local.run_dir / "checkpoints").mkdir(parents=True)
    with (local.run_dir / "checkpoints/writer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = local.start("--steps", "3", PAUSE="600", PAUSE_MAX="600")
        eventually(lambda: ": again" in job.output(), HANG, job.output)
        os.kill(job.process.pid, signal.SIGTERM)
        outcome = job.wait()
    assert outcome.status == status.FAILED, outcome
    assert outcome.stdout.count("[job] status") == 1


def test_a_signal_before_the_launch_is_not_lost():
    assert bash("leave; status=0; run_launch touch /nonexistent/launched || status=$?; echo $status") == "75"


@pytest.mark.parametrize(("how", "received"), [("leave", "1"), ("leave insist", "2")])
def test_a_second_signal_reaches_the_launch_only_if_it_is_to_insist(tmp_path, how, received):
    launch = """n=0; trap '((n += 1))' USR1; touch ready; until [[ -e enough ]]; do sleep 0.1; done; exit $n"""
    twice = "until [[ -e ready ]]; do sleep 0.1; done; for i in 1 2; do kill -USR1 $$; sleep 1; done; touch enough"
    script = f"trap '{how}' USR1; ({twice}) & status=0; run_launch bash -c \"$1\" || status=$?; echo $status"
    here = f"cd {shlex.quote(str(tmp_path))}; set -- {shlex.quote(launch)}"
    assert bash(f"{here}; {script}; :").splitlines()[-1] == received


def bash(function: str, *arguments: object) -> str:
    script = f'set -euo pipefail; . "{JOBS}/_common.sh"; {function} "$@"'
    command = ["bash", "-c", script, "bash", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("left", "before", "after", "count", "verdict"),
    [
        (status.FINISHED, 0, 20, 1, "finished"),
        (status.FINISHED, 20, 20, 3, "finished"),
        (status.USAGE, 0, 0, 1, "hopeless"),
        (status.DIVERGED, 10, 20, 1, "hopeless"),
        (status.DAMAGED, 10, 10, 1, "hopeless"),
        (status.PREEMPTED, 10, 11, 3, "again"),
        (status.PREEMPTED, 10, 10, 3, "give-up"),
        (status.HUNG, 10, 10, 2, "again"),
        (status.HUNG, 10, 10, 3, "give-up"),
        (status.FAILED, 10, 10, 1, "again"),
        (status.FAILED, 10, 5, 3, "give-up"),
        (9, 0, 10, 3, "again"),
        (137, 0, 0, 3, "give-up"),
    ],
)
def test_a_launch_is_repeated_after_progress_or_a_bounded_number_of_times(left, before, after, count, verdict):
    assert bash("decide", left, before, after, count, 3) == verdict


def test_only_committed_steps_count_and_as_numbers(tmp_path):
    assert bash("newest_step", tmp_path) == "0"
    for name in ("step_00000009", "step_00000010", "step_00000100.damaged", "step_100000008"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "manifest.json").touch()
    (tmp_path / "checkpoints/step_900000000").mkdir()  # without a manifest
    assert bash("newest_step", tmp_path) == "100000008"


def test_a_step_that_is_committed_on_the_nodes_counts_until_the_run_goes_back_behind_it(tmp_path):
    def log(*rows: dict, torn: str = "") -> str:
        for row in rows:
            with MetricsLog(tmp_path) as metrics_log:
                metrics_log.write(row)
        with (tmp_path / metrics.FILE_NAME).open("a") as file:
            file.write(torn)
        return bash("newest_step", tmp_path)

    directory = names.step_dir(tmp_path / "checkpoints", 10)
    directory.mkdir(parents=True)
    (directory / "manifest.json").touch()
    assert log({"event": "launch", "step": 0, "settings": {"event": "commit", "step": 99}}, {"step": 98}) == "10"
    assert log({"event": "commit", "step": 90, "nbytes": 1, "tier": "local"}) == "90"
    assert log({"event": "commit", "step": 100, "nbytes": 1}, {"event": "upload", "step": 300}) == "100"
    assert log(torn='{"event": "commit", "step": 110, "nbytes"') == "100"
    assert log({"event": "restore", "step": 90, "restore_seconds": 0.1}) == "90"
    assert log({"event": "restore", "step": 5}) == "10", "what the directory holds counts in any case"


def test_launches_that_advance_on_the_nodes_alone_are_not_given_up(local):
    """Each dies a step before the run would be shared; the nodes have what it did."""
    train = ("--steps", "12", "--local", "nodes/{domain}", "--redundancy", "single", "--no-async-io")
    faults = (f for step in (5, 8, 11) for f in ("--inject", f"kill:{step}:1"))
    outcome = local.start(*train, *faults, CKPT_EVERY="3steps", MAX_LAUNCHES="2").wait()
    assert outcome.status == status.FINISHED, outcome
    assert re.findall(r"status \d+ at step (\d+): again", outcome.stdout) == ["3", "6", "9"]


def test_launches_in_a_row_without_progress_are_counted_across_scripts(tmp_path):
    def commit(step: int) -> None:
        directory = names.step_dir(tmp_path / "checkpoints", step)
        directory.mkdir(parents=True)
        (directory / "manifest.json").touch()

    assert bash("count_launch", tmp_path, "first") == "1"
    assert bash("count_launch", tmp_path, "next") == "2"
    assert bash("count_launch", tmp_path, "next") == "3"
    commit(8)
    assert bash("count_launch", tmp_path, "next") == "1"
    assert bash("count_launch", tmp_path, "next") == "2"
    commit(9)
    assert bash("count_launch", tmp_path, "next") == "1"
    shutil.rmtree(tmp_path / "checkpoints/step_00000009")  # rolled back: no progress
    assert bash("count_launch", tmp_path, "next") == "2"
    assert bash("count_launch", tmp_path, "first") == "1"


def test_the_statuses_that_end_the_loop_are_those_of_the_program():
    verdicts = bash("for number in {0..255}; do decide $number 0 1 1 3; done; :").splitlines()
    assert len(verdicts) == 256
    hopeless = [number for number, verdict in enumerate(verdicts) if verdict == "hopeless"]
    assert hopeless == sorted([status.USAGE, status.DIVERGED, status.DAMAGED])


def test_the_runbook_names_every_status_error_and_event():
    runbook = (JOBS / "README.md").read_text()
    statuses = {str(value) for value in vars(status).values() if isinstance(value, int)}
    kinds = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    events = set(re.findall(r"^    ([a-z_]+) ", str(metrics.__doc__), re.MULTILINE))
    assert {"73", "75"} <= statuses
    assert {"launch", "commit"} <= events
    explained = set(re.findall(r"`(\w+)`", runbook)) | set(re.findall(r"^\| (\d+) \|", runbook, re.MULTILINE))
    assert statuses | kinds - {"Any", "ExplainedError", "CheckpointError"} | events <= explained


def test_the_scripts_are_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = sorted(str(path.relative_to(ROOT)) for path in JOBS.iterdir() if path.suffix in (".sh", ".sbatch"))
    assert len(scripts) == 5
    outcome = subprocess.run(
        ["shellcheck", "--external-sources", *scripts],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stdout
