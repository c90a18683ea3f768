"""jobs/train.sbatch under a real Slurm: each story is a job that something happens to, all of them at the same time.

A story stops the ranks (SIGSTOP) while it waits for Slurm, so that no run is over before its story is.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mpi_ckpt.storage import names
from mpi_ckpt.train import status
from tests import slurm
from tests.launch import ROOT, is_open_mpi
from tests.slurm import Cluster, eventually

STEPS = 600
TRAIN = ("--steps", str(STEPS), "--lr", "1e-3")  # calm: a rollback would lead back to whatever step is committed
PATIENCE = 240  # seconds; a story takes less than 60 on a quiet machine

# n1 is for whoever has a node to himself or shares it; n2 is fought over; n4 will be lost; n5 and n6 have one job.
NODES = {"n1": 16, "n2": 2, "n3": 2, "n4": 2, "n5": 1, "n6": 1}


@dataclass
class Story:
    """One job and its run directory."""

    cluster: Cluster
    home: Path
    job: str = ""
    knobs: dict[str, str] = field(default_factory=dict)
    deadline: float = field(default_factory=lambda: time.monotonic() + PATIENCE)

    def submit(self, *sbatch: str, train: tuple[str, ...] = TRAIN) -> None:
        [self.job] = self.call("sbatch", *self.options(*sbatch), "jobs/train.sbatch", *train)

    def options(self, *sbatch: str) -> tuple[str, ...]:
        return "--mincpus=2", f"--output={self.home}/job.log", *sbatch

    def call(self, *command: str) -> list[str]:
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        knobs = {"VENV": "", "PATH": path, "RUN_DIR": str(self.run_dir), "CKPT_EVERY": "100steps", **self.knobs}
        return self.cluster.submit(*command, cwd=ROOT, **knobs)

    @property
    def run_dir(self) -> Path:
        return self.home / "run"

    def log(self) -> str:
        file = self.home / "job.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def rows(self) -> list[dict]:
        """All lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.rows() if "loss" in row and "event" not in row}

    def events(self, name: str) -> list[dict]:
        return [row for row in self.rows() if row.get("event") == name]

    def newest(self) -> int:
        return max(names.list_steps(self.run_dir / "checkpoints"), default=0)

    def until(self, is_true) -> None:
        eventually(is_true, self.deadline - time.monotonic(), lambda: f"{self.cluster.show(self.job)}\n{self.log()}")

    def until_log_has(self, text: str, times: int = 1) -> None:
        self.until(lambda: self.log().count(text) >= times)

    def end(self) -> None:
        """Until the script says that it will not launch again; before a requeue, too, a job is over for a moment."""
        self.until(lambda: re.search(r"\[job\] status .*: (finished|hopeless|give-up)\n", self.log()))
        self.until(lambda: self.cluster.ended(self.job))

    def state(self) -> str:
        return self.cluster.show(self.job)["JobState"]

    def restarts(self) -> int:
        return int(self.cluster.show(self.job)["Restarts"])

    @contextlib.contextmanager
    def ranks_stopped_after_a_commit(self) -> Iterator[list[int]]:
        """The ranks stand still, in the middle of the run, with a step committed."""
        self.until(lambda: self.newest() > 0)
        ranks = self.cluster.ranks(self.job)
        assert len(ranks) >= 2, self.log()
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield ranks
        finally:
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def undisturbed(story: Story) -> None:
    story.knobs["LAUNCHER"] = "mpirun"
    story.submit("--nodelist=n5,n6", "--nodes=2", "--mincpus=1")
    story.end()


def out_of_time(story: Story) -> None:
    story.submit("--nodelist=n1", "--nodes=1", "--time=1", "--signal=B:USR1@30")
    with story.ranks_stopped_after_a_commit():
        story.until_log_has("passing USR1 on")
    story.end()


def out_of_time_with_mpirun(story: Story) -> None:
    story.knobs["LAUNCHER"] = "mpirun"
    out_of_time(story)


def preempted(story: Story) -> None:
    story.submit("--nodelist=n2", "--nodes=1", "--partition=low", "--signal=B:USR1@1")
    with story.ranks_stopped_after_a_commit():
        wrap = ("--nodelist=n2", "--ntasks=2", f"--output={story.home}/other.log", "--wrap", "sleep 1")
        [other] = story.call("sbatch", "--partition=high", *wrap)
        story.until_log_has("passing USR1 on")
    story.until(lambda: story.cluster.ended(other))
    story.end()


def step_cancelled(story: Story) -> None:
    story.submit("--nodelist=n1", "--nodes=1")
    with story.ranks_stopped_after_a_commit():
        story.cluster.run("scancel", f"{story.job}.0")
    story.end()


def step_terminated(story: Story) -> None:
    story.submit("--nodelist=n1", "--nodes=1")
    with story.ranks_stopped_after_a_commit():
        story.cluster.run("scancel", "--signal=TERM", f"{story.job}.0")
    story.end()


def job_cancelled(story: Story) -> None:
    story.submit("--nodelist=n1", "--nodes=1")
    with story.ranks_stopped_after_a_commit():
        story.cluster.run("scancel", story.job)
    story.until(lambda: not story.cluster.run("squeue", "-ho%A", f"-j{story.job}").split())


def rank_killed(story: Story) -> None:
    story.submit("--nodelist=n1", "--nodes=1")
    with story.ranks_stopped_after_a_commit() as ranks:
        os.kill(ranks[1], signal.SIGKILL)
    story.end()


def node_lost(story: Story) -> None:
    story.submit("--exclude=n1,n2,n5,n6", "--nodes=1-2", "--time=10")
    with story.ranks_stopped_after_a_commit():
        story.cluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=lost")
    story.end()


def chained(story: Story) -> None:
    """The first link is asked to leave; the second finishes the run."""
    sbatch = story.options("--nodelist=n1", "--nodes=1")
    story.job, second = story.call("jobs/chain.sh", "2", *sbatch, "--", *TRAIN)
    with story.ranks_stopped_after_a_commit():
        story.cluster.run("scancel", "--batch", "--signal=USR1", story.job)
    story.until_log_has(f"status {status.PREEMPTED} at step")
    story.until(lambda: story.cluster.ended(story.job))
    story.job = second
    story.end()


def wrong_usage(story: Story) -> None:
    story.submit("--nodelist=n1", "--nodes=1", train=("--lr", "-1"))
    story.end()


def never_progresses(story: Story) -> None:
    story.knobs["MAX_LAUNCHES"] = "2"
    (story.run_dir / "checkpoints").mkdir(parents=True)
    (story.run_dir / "checkpoints/writer.lock").mkdir()  # no launch can open it
    story.submit("--nodelist=n1", "--nodes=1")
    story.end()


STORIES = (
    undisturbed,
    out_of_time,
    out_of_time_with_mpirun,
    preempted,
    step_cancelled,
    step_terminated,
    job_cancelled,
    rank_killed,
    node_lost,
    chained,
    wrong_usage,
    never_progresses,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = slurm.why_not() or ("srun speaks to the MPICH wheel" if is_open_mpi() else None)
    if reason:
        pytest.skip(reason)
    one = Cluster(tmp_path_factory.mktemp("slurm"), NODES)
    yield one
    one.stop()


@pytest.fixture(scope="module")
def told(cluster, tmp_path_factory):
    """Gives the end of a story. All are being told at once."""
    with concurrent.futures.ThreadPoolExecutor(len(STORIES)) as pool:

        def tell(plot) -> Story:
            story = Story(cluster, tmp_path_factory.mktemp(plot.__name__))
            plot(story)
            return story

        futures = {plot: pool.submit(tell, plot) for plot in STORIES}
        yield lambda plot: futures[plot].result()  # a story has its own deadline


@pytest.fixture(scope="module")
def expected(told) -> dict[int, float]:
    """The losses of a run that nothing has happened to."""
    return told(undisturbed).losses()


def test_a_job_runs_to_its_end_on_two_nodes(told, expected):
    story = told(undisturbed)
    assert (story.state(), story.restarts(), story.newest()) == ("COMPLETED", 0, STEPS), story.log()
    assert list(expected) == list(range(1, STEPS + 1))
    assert "2 ranks on n[5-6]" in story.log()


@pytest.mark.parametrize("plot", [out_of_time, out_of_time_with_mpirun])
def test_a_job_out_of_time_checkpoints_requeues_itself_and_ends_with_the_same_losses(plot, told, expected):
    story = told(plot)
    assert story.state() == "COMPLETED", story.log()
    assert story.restarts() >= 1
    assert f"status {status.PREEMPTED} at step" in story.log()
    assert story.events("preemption")[0]["reason"] == "SIGUSR1"
    assert story.losses() == expected


def test_a_job_that_is_preempted_leaves_at_once_and_goes_on_later(told, expected):
    story = told(preempted)
    assert story.state() == "COMPLETED", story.log()
    assert story.restarts() >= 1
    assert story.events("preemption")[0]["reason"] == "SIGUSR1"
    assert story.losses() == expected


def test_a_cancelled_step_is_killed_and_the_job_requeues_itself(told, expected):
    story = told(step_cancelled)
    assert (story.state(), story.restarts()) == ("COMPLETED", 1), story.log()
    assert not story.events("preemption")
    assert story.losses() == expected


def test_a_terminated_step_checkpoints_and_the_job_requeues_itself(told, expected):
    story = told(step_terminated)
    assert (story.state(), story.restarts()) == ("COMPLETED", 1), story.log()
    assert story.events("preemption")[0]["reason"] == "SIGTERM"
    assert story.losses() == expected


def test_a_cancelled_job_stays_cancelled(told):
    story = told(job_cancelled)
    assert (story.state(), story.restarts()) == ("CANCELLED", 0), story.log()
    assert 0 < story.newest() < STEPS


def test_a_job_whose_rank_was_killed_requeues_itself(told, expected):
    story = told(rank_killed)
    assert (story.state(), story.restarts()) == ("COMPLETED", 1), story.log()
    assert story.losses() == expected


def test_a_job_that_lost_a_node_goes_on_with_the_ranks_that_remain(told):
    story = told(node_lost)
    assert (story.state(), story.restarts()) == ("COMPLETED", 1), story.log()
    assert [event["ranks"] for event in story.events("launch")] == [4, 2]
    assert story.newest() == STEPS
    assert sorted(story.losses()) == list(range(1, STEPS + 1))


def test_the_links_of_a_chain_carry_one_run_to_its_end(told, expected):
    story = told(chained)
    assert (story.state(), story.restarts()) == ("COMPLETED", 0), story.log()
    assert story.log().count("[job] launch 1:") == 2
    assert story.losses() == expected


def test_a_usage_error_is_not_tried_again(told):
    story = told(wrong_usage)
    assert (story.state(), story.restarts()) == ("FAILED", 0), story.log()
    assert f"status {status.USAGE} at step 0: hopeless" in story.log()


def test_a_job_without_progress_gives_up_after_its_tries(told):
    story = told(never_progresses)
    assert (story.state(), story.restarts()) == ("FAILED", 1), story.log()
    assert "give-up" in story.log()


def test_the_cluster_leaves_no_process_behind(tmp_path):
    reason = slurm.why_not()
    if reason:
        pytest.skip(reason)
    root = tmp_path / "slurm"
    root.mkdir()
    cluster = Cluster(root, {"n1": 2})
    try:
        [job] = cluster.submit("sbatch", f"--output={root}/log", "--wrap", "exec sleep 600", cwd=root)
        eventually(lambda: cluster.show(job)["JobState"] == "RUNNING", 20, lambda: str(cluster.show(job)))
        eventually(lambda: any("sleep\x00600" in _command(pid) for pid in _processes_of(root)), 20)
        began = time.monotonic()
    finally:
        cluster.stop()
    assert time.monotonic() - began < 20
    assert not _processes_of(root)


def _processes_of(root: Path) -> list[str]:
    """The ids of the processes that have the directory in their command line or environment."""
    return [pid for pid in os.listdir("/proc") if pid.isdecimal() and str(root) in _command(pid)]


def _command(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc", pid, "cmdline").read_text() + Path("/proc", pid, "environ").read_text()
    return ""
