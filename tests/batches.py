"""All MPI tests of a file that want the same number of ranks, in one launch.

pytest-isolate-mpi starts `mpirun` for every test, and every rank its imports: most of the time of a short test. Here
the first test of a file and a number of ranks starts them all. Each keeps its name, the reports of its ranks and its
hang limit, which counts from the end of the test before. The first that fails, hangs or loses a rank ends the launch;
what comes after it goes on in another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.reports import TestReport

from tests.launch import Job, mpirun

# The plugin's: set in each rank; and where a rank leaves the reports of a test. Ours: where each test has such a place.
IN_A_LAUNCH, REPORTS, BATCH = "PYTEST_ISOLATE_MPI_IS_FORKED", "PYTEST_MPI_REPORTS_PATH", "MPI_CKPT_TEST_BATCH"
START = 60.0  # seconds that a launch may take before its first test


@pytest.hookimpl(trylast=True)  # after the plugin, to come before it in each test
def pytest_configure(config: pytest.Config) -> None:
    if BATCH in os.environ:
        config.pluginmanager.register(Inside(Path(os.environ[BATCH])))
    elif not config.getoption("--no-mpi-isolation"):
        config.pluginmanager.register(Batches())


def reports_of(directory: Path, item: pytest.Item) -> Path:
    return directory / hashlib.sha256(item.nodeid.encode()).hexdigest()


class Inside:
    """In each rank: every test has a place of its own for the reports, and ends on all ranks before the next begins."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.between = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        from mpi4py import MPI

        from tests.checkpoints import meet

        os.environ[REPORTS] = str(reports_of(self.directory, item))
        self.between = self.between or MPI.COMM_WORLD.Dup()  # a test may leave its own traffic on the world
        result = yield
        if not item.session.shouldfail:  # this rank would leave now, and so end the launch
            meet(self.between)
        return result


class Batches:
    """In the session that the user started: launches, and what came of them."""

    def __init__(self) -> None:
        self.reports: dict[str, list[TestReport]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if item.get_closest_marker("mpi") is None:
            return None
        if item.nodeid not in self.reports:
            self.launch([other for other in item.session.items if together(item, other)])
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self.reports[item.nodeid]:
            item.ihook.pytest_runtest_logreport(report=report)
        # The launch tore down what it had set up; here remains what tests without MPI before this one have.
        setup = item.session._setupstate
        call = pytest.CallInfo.from_call(lambda: setup.teardown_exact(nextitem), when="teardown")
        item.ihook.pytest_runtest_logreport(report=TestReport.from_item_and_call(item, call))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def launch(self, items: list[pytest.Item]) -> None:
        """Run those that have no reports yet, as far as the first that does not pass."""
        items = [item for item in items if item.nodeid not in self.reports]
        with tempfile.TemporaryDirectory(prefix="mpi_ckpt-reports-") as name:
            directory = Path(name)
            for item in items:
                reports_of(directory, item).mkdir()
            env = {**os.environ, IN_A_LAUNCH: "1", BATCH: name}
            job = Job(command(items), items[0].config.rootpath, env, logs=directory)
            try:
                why = await_all(job, items, directory)
            finally:
                job.end()
            for item in items:
                found, missing = read(reports_of(directory, item), ranks_of(item))
                self.reports[item.nodeid] = found + ([lost(item, why, job.output())] if missing else [])
                if missing or any(report.failed for report in found):
                    return


def ranks_of(item: pytest.Item) -> int:
    return item.callspec.params.get("mpi_ranks", 1) if hasattr(item, "callspec") else 1


def together(one: pytest.Item, other: pytest.Item) -> bool:
    """Whether the other may be in the launch of the one."""
    return other.get_closest_marker("mpi") is not None and one.path == other.path and ranks_of(one) == ranks_of(other)


def command(items: list[pytest.Item]) -> list[str]:
    option = items[0].config.option
    flags = [f"--tb={option.tbstyle}", f"--color={option.color}", f"--capture={option.capture}", "--no-header", "-x"]
    flags += ["--showlocals"] * option.showlocals + ["-v"] * option.verbose
    python = [sys.executable, "-m", "mpi4py", "-m", "pytest"]
    return [mpirun(), "-n", str(ranks_of(items[0])), *python, *flags, *(item.nodeid for item in items)]


def await_all(job: Job, items: list[pytest.Item], directory: Path) -> str:
    """Wait until the launch has ended, or a test has not ended in its time; why there may be no more reports."""
    began = time.monotonic() + START
    for item in items:
        limit = item.get_closest_marker("mpi").kwargs["timeout"]
        while len(os.listdir(reports_of(directory, item))) < ranks_of(item):
            if job.process.poll() is not None:
                return "a rank has ended before its time"
            if time.monotonic() > began + limit:
                return f"still running after {limit} s: a hang"
            time.sleep(0.005)
        began = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(START)
    return "a rank has ended before its time"


def read(directory: Path, ranks: int) -> tuple[list[TestReport], bool]:
    """The reports of a test that its ranks have left, and whether a rank has left none."""
    found: list[TestReport] = []
    missing = False
    for rank in range(ranks):
        try:
            found += pickle.loads((directory / str(rank)).read_bytes())
        except (FileNotFoundError, EOFError, pickle.UnpicklingError):  # it was killed before, or while it wrote
            missing = True
    return found, missing


def lost(item: pytest.Item, why: str, output: str) -> TestReport:
    report = TestReport(item.nodeid, item.location, {}, "failed", f"{item.nodeid}: {why}", "call")
    report.sections.append(("Output of the launch", output))
    return report
