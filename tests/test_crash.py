"""SIGKILL at every durable operation of the protocol: restart finds the old step or the new one, whole, every time.

Real kills say what a launch, its survivors and its lock leave behind; images of the directory after every single
change, by any rank, say what a kill of all at that moment would. A power cut may lose more: what was not fsynced.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch import Launcher, Outcome, is_open_mpi
from tests.programs.faults import DURABLE

CRASH, LEAVE, RESTART = (("-m", f"tests.programs.{name}") for name in ("crash", "leave", "restart"))
SAVES = {"first": [1, "new"], "rotation": [3, "new"], "overwrite": [2, "new"]}  # what each scenario saves
BEFORE = {"first": [], "rotation": [[1, "old"], [2, "old"]], "overwrite": [[1, "old"], [2, "old"]]}


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

    def leave(self, *ways: str) -> list[tuple[Path, Outcome]]:
        """Run `leave` in each of these ways, two at a time; where, and how it ended."""

        def run(way: str) -> tuple[Path, Outcome]:
            root = self.launcher.cwd / way.replace(" ", "-")
            return root, self.launcher(self.ranks, *LEAVE, root, *way.split(), timeout=30)

        with ThreadPoolExecutor(2) as two:
            return list(two.map(run, ways))

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


def stride(usual: int) -> int:
    """Every operation is killed where that was asked for; a launch of Open MPI takes four times as long."""
    return 1 if "MPI_CKPT_SLOW_TESTS" in os.environ else 4 if is_open_mpi() else usual


@pytest.mark.parametrize("mode", [["--sync"], []], ids=["sync", "async"])
@pytest.mark.parametrize("scenario", SAVES)
def test_rank_0_killed_at_any_operation_leaves_the_old_or_the_new_step(two, scenario, mode):
    two.restart(sweep(two, scenario, mode, 0, stride(1 if mode else 6)))


@pytest.mark.parametrize(("rank", "scenario"), [(1, "overwrite"), (2, "rotation")])
def test_any_rank_killed_at_any_operation_leaves_the_old_or_the_new_step(three, rank, scenario):
    three.restart(sweep(three, scenario, [], rank, stride(2)))


@pytest.mark.parametrize("scenario", SAVES)
def test_all_killed_after_any_change_or_without_power_leave_the_old_or_the_new_step(two, scenario):
    directory = two.directory(f"{scenario}-images", scenario)
    two.run(directory, scenario, "--images").check()
    images = directory / f"{scenario}.images"
    entries, renamed, durable = [], False, False
    for name in sorted(path.name for path in images.iterdir() if not path.name.startswith(".")):
        durable |= renamed and name.endswith(f"-0-fsync-step_{SAVES[scenario][0]:08d}.power")
        renamed |= name.endswith("-rename-manifest.json")
        new = durable or name == "end.power" if name.endswith(".power") else renamed
        then = ("same", "next")[len(entries) % 2]
        entries.append(two.entry(images / name, scenario, ["new" if new else "old"], [then]))
    assert entries[-1]["root"].endswith("end.power")
    assert durable
    two.restart(entries)


def after_leaving(root: Path, *newest: int) -> dict:
    """What a restart must find after `leave`: one of these steps."""
    return {
        "root": str(root),
        "save": [2, "x"],
        "before": [[1, "x"]],
        "newest": [[step, "x"] if step else None for step in newest],
        "then": ["same", "next"],
    }


def test_any_rank_killed_right_after_an_asynchronous_save_leaves_the_step_before(two):
    entries = []
    for root, outcome in two.leave("kill 0", "kill 1"):
        assert outcome.status != 0
        entries.append(after_leaving(root, 1))
    two.restart(entries)


def test_an_exception_on_one_rank_comes_out_while_the_others_wait_in_a_collective(two):
    ways = {"throw 0": 2, "throw 1": 2, "throw_before 0": 0, "throw_before 1": 0}  # and the newest step then
    entries = []
    for (root, outcome), newest in zip(two.leave(*ways), ways.values(), strict=True):
        assert outcome.status != 0
        assert outcome.seconds < 15
        assert f"RuntimeError: rank {root.name[-1]} has had enough" in outcome.stderr
        entries.append(after_leaving(root, newest))
    two.restart(entries)


def test_leaving_without_waiting_leaves_the_last_save_whole_or_visibly_absent(two):
    ways = {"close": [2], "exit_inside": [2], "exit_plainly": [1, 2], "fall_off": [1, 2]}
    entries = []
    for (root, outcome), newest in zip(two.leave(*ways), ways.values(), strict=True):
        outcome.check()
        entries.append(after_leaving(root, *newest))
    two.restart(entries)


def test_when_only_the_last_save_fails_the_program_exits_non_zero(two):
    entries = []
    for root, outcome in two.leave("fail 0", "fail 1", "fail_and_exit 0", "fail_and_exit 1"):
        assert outcome.status != 0
        assert f"h5.tmp, rank {root.name[-1]})" in outcome.stderr
        entries.append(after_leaving(root, 1))
    two.restart(entries)


def test_a_reader_never_sees_a_committed_step_that_lacks_a_shard(three):
    root = three.launcher.cwd / "polled"
    job = three.launcher.start(3, *LEAVE, root, "close", env={"SLOW": "1"})
    waited = 0
    while job.process.poll() is None:
        for directory in root.glob("step_*"):
            try:
                manifest = json.loads((directory / "manifest.json").read_text())
            except FileNotFoundError:
                waited += directory.name == "step_00000002"
                continue
            assert [(directory / s["path"]).stat().st_size for s in manifest["shards"]] == [
                s["nbytes"] for s in manifest["shards"]
            ]
        time.sleep(0.005)
    job.wait(1).check()
    assert waited > 50, "step 2 was never seen on its way"
    assert len(list(root.glob("step_*/manifest.json"))) == 2


def test_leftovers_are_ignored_then_cleaned_and_foreign_files_stay(three):
    directory = three.directory("leftovers", "rotation")
    root, elsewhere = directory / "rotation", directory / "elsewhere"
    shard = (root / "step_00000002" / "rank00000.h5").read_bytes()
    ours = {
        "step_00000003/rank00000.h5": shard,  # of the step that will be saved, half-written
        "step_00000003/rank00001.h5.tmp": shard[:5000],
        "step_00000003/manifest.json.tmp": b"{",
        "step_00000998/rank00000.h5": shard,  # without a manifest
        "step_00000998/rank00007-0123456789abcdef.h5": shard,
        "step_00000997/rank00002.h5": b"",  # beside a foreign file
    }
    foreign = {
        "step_00000997/notes.txt": b"mine",
        "step_00000003/rank00000.h5.bak": b"mine",
        "step_00000002/rank00000.H5": b"mine",
        "step_00000996/notes/rank00000.h5": b"mine",
        "step_10/rank00000.h5": b"mine",
        "step_00000995.old/manifest.json": b"mine",
        "step_00000994": b"a file",
        "notes.txt": b"mine",
    }
    for name, data in (ours | foreign).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "step_00000999").mkdir()
    shutil.copytree(root / "step_00000002", elsewhere)
    (elsewhere / "manifest.json").unlink()
    (root / "step_00000993").symlink_to(elsewhere)
    entry = three.entry(root, "rotation", ["old"], ["same", "next"])
    three.restart([entry | {"foreign": [*foreign, "step_00000993"]}])
    assert {name: (root / name).read_bytes() for name in foreign} == foreign
    assert len(list(elsewhere.iterdir())) == 4
    assert not [name for name in ours if name.startswith("step_0000099") and (root / name).exists()]
    assert not (root / "step_00000999").exists()
