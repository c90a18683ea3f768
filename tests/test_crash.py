"""SIGKILL at every durable operation of the protocol: restart finds the old step or the new one, whole, every time.

Real kills say what a launch, its survivors and its lock leave behind; images of the directory after every single
change, by any rank, say what a kill of all at that moment would. A power cut may lose more: what was not fsynced.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch import Launcher, Outcome, is_open_mpi
from tests.programs.faults import DURABLE

CRASH, RESTART = ("-m", "tests.programs.crash"), ("-m", "tests.programs.restart")
SAVES = {"first": [1, "new"], "rotation": [3, "new"], "overwrite": [2, "new"]}  # what each scenario saves
BEFORE = {"first": [], "rotation": [[1, "old"], [2, "old"]], "overwrite": [[1, "old"], [2, "old"]]}
FOREIGN = ("step_00000002/notes.txt", "step_10/rank00000.h5.tmp", "step_00000099.txt")


class Crashes:
    """Runs scenarios on `ranks` ranks in directories of their own, and restarts from what is left of them."""

    def __init__(self, launcher: Launcher, ranks: int) -> None:
        self.launcher, self.ranks = launcher, ranks
        self.launcher(ranks, *CRASH, launcher.cwd, "base").check()

    def directory(self, name: str, *scenarios: str) -> Path:
        """A new directory, where `scenarios` find what they start from."""
        directory = self.launcher.cwd / name
        directory.mkdir()
        for scenario in scenarios:
            if BEFORE[scenario]:
                shutil.copytree(self.launcher.cwd / "base", directory / scenario)
        return directory

    def run(self, directory: Path, *arguments: str) -> Outcome:
        outcome = self.launcher(self.ranks, *CRASH, directory, *arguments)
        for note in directory.glob("shared.*"):  # of MPICH, 4 MB a killed job
            for path in note.read_text().split():
                Path(path).unlink(missing_ok=True)
        return outcome

    def operations(self, directory: Path, scenario: str, rank: int) -> list[str]:
        """The durable operations of a rank: 'rename step_00000001/rank00000.h5', and so on."""
        lines = (directory / f"{scenario}.ops" / str(rank)).read_text().splitlines()
        return [line[7:] for line in lines if line.startswith("before ") and line.split()[1] in DURABLE]

    def entry(self, root: Path, scenario: str, newest: Iterable[str], then: Iterable[str]) -> dict:
        """What a restart in `root` has to find; `newest` is of "old" and "new", `then` of "same" and "next"."""
        outcomes = {"old": (BEFORE[scenario] or [None])[-1], "new": SAVES[scenario]}
        return {
            "root": str(root),
            "save": SAVES[scenario],
            "before": BEFORE[scenario],
            "newest": [outcomes[name] for name in newest],
            "then": list(then),
        }

    def restart(self, entries: list[dict]) -> None:
        (self.launcher.cwd / "list.json").write_text(json.dumps(entries))
        self.launcher(self.ranks, *RESTART, "list.json", timeout=120).check()


def committed(directory: Path, scenario: str) -> list[str]:
    """What rank 0 had come to: the manifest's new name makes the difference."""
    journal = (directory / f"{scenario}.ops" / "0").read_text()
    if f"after rename step_{SAVES[scenario][0]:08d}/manifest.json\n" in journal:
        return ["new"]
    began = f"\nbefore rename step_{SAVES[scenario][0]:08d}/manifest.json\n" in journal
    return ["old", "new"] if began else ["old"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("two"))
    yield Crashes(launcher, 2)
    launcher.end_all()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("three"))
    yield Crashes(launcher, 3)
    launcher.end_all()


def sweep(crashes: Crashes, scenario: str, mode: list[str], rank: int, stride: int) -> list[dict]:
    """Kill `rank` at every `stride`-th of its durable operations, in a launch each; what a restart must find."""
    label = f"{scenario}{''.join(mode)}-{rank}"
    whole = crashes.directory(label, scenario)
    crashes.run(whole, scenario, *mode).check()
    n = len(crashes.operations(whole, scenario, rank))
    points = [("before", i) for i in range(0, n, stride)] + [("after", n - 1)]

    def kill(point: tuple[str, int]) -> dict:
        when, number = point
        directory = crashes.directory(f"{label}-{when}-{number}", scenario)
        outcome = crashes.run(directory, scenario, *mode, "--kill", str(rank), when, str(number))
        assert outcome.status != 0, f"{directory.name} was not killed"
        then = ("same", "next") if number // stride % 2 else ("next", "same")
        return crashes.entry(directory / scenario, scenario, committed(directory, scenario), then)

    with ThreadPoolExecutor(2) as two:
        return list(two.map(kill, points))


@pytest.mark.parametrize("mode", [[], ["--sync"]], ids=["async", "sync"])
@pytest.mark.parametrize("scenario", SAVES)
def test_rank_0_killed_at_any_operation_leaves_the_old_or_the_new_step(two, scenario, mode):
    two.restart(sweep(two, scenario, mode, 0, stride=4 if is_open_mpi() else 1 if mode else 2))


@pytest.mark.parametrize(("rank", "scenario"), [(1, "first"), (1, "overwrite"), (2, "rotation"), (2, "overwrite")])
def test_any_rank_killed_at_any_operation_leaves_the_old_or_the_new_step(three, rank, scenario):
    three.restart(sweep(three, scenario, [], rank, stride=3 if is_open_mpi() else 1))


@pytest.mark.parametrize("scenario", SAVES)
def test_all_killed_after_any_change_or_without_power_leave_the_old_or_the_new_step(three, scenario):
    directory = three.directory(f"{scenario}-images", scenario)
    three.run(directory, scenario, "--images").check()
    images = directory / f"{scenario}.images"
    entries, renamed, durable = [], False, False
    for name in sorted(path.name for path in images.iterdir() if not path.name.startswith(".")):
        durable |= renamed and name.endswith(f"-0-fsync-step_{SAVES[scenario][0]:08d}.power")
        renamed |= name.endswith("-rename-manifest.json")
        new = durable or name == "end.power" if name.endswith(".power") else renamed
        then = ("same", "next")[len(entries) % 2]
        entries.append(three.entry(images / name, scenario, ["new" if new else "old"], [then]))
    assert entries[-1]["root"].endswith("end.power")
    assert durable
    three.restart(entries)
