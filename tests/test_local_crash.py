"""SIGKILL of a rank at every rename and removal that a launch makes on the nodes: a restart finds the newest step.

In a save, when a launch sets right what the one before has left, and in a restore that makes files again. Here some of
the points; all of them with MPI_CKPT_SLOW_TESTS in the environment.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch import Launcher

PROGRAM = "-m", "tests.programs.node_crash"
RANKS = 4
Points = dict[str, list[tuple[int, float]]]  # by scenario: a rank, and how far into its operations (from 0 to 1)

OLD, LATER = [2, "old"], [2, "new"]  # saves: step and tag
LOST = {"save-partner": "b", "save-rs:2+1": "c", "save-rs:2+2": "bc", "again-partner": "b"}  # what may be lost at once
SAVES: Points = {"save-partner": [(0, 0.95), (3, 0.2)], "save-rs:2+1": [(1, 0.4)], "save-rs:2+2": [(2, 0.5)]}
RESTORES: Points = {"settle": [(3, 0.6)], "protect-partner": [(1, 0.5)], "complete": [(2, 0.1)]}
if "MPI_CKPT_SLOW_TESTS" in os.environ:
    SAVES["again-partner"] = []
    RESTORES |= {"settle-again": [], "protect-rs:2+2": [], "rebuild": []}


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("nodes"))
    launcher(RANKS, *PROGRAM, launcher.cwd, "base", *SAVES, *RESTORES).check()
    yield launcher
    launcher.end_all()


def sweep(launcher: Launcher, few: Points) -> list[tuple[str, Path]]:
    """What is left, scenario by scenario, of a launch for each of these points: those of all ranks, or a `few`."""
    counts = json.loads((launcher.cwd / "operations.json").read_text())
    points = [(name, rank, "before", int(part * counts[name][rank])) for name in few for rank, part in few[name]]
    if "MPI_CKPT_SLOW_TESTS" in os.environ:
        ranks = [(name, rank, count) for name in few for rank, count in enumerate(counts[name]) if count]
        points = [(name, rank, "before", number) for name, rank, count in ranks for number in range(count)]
        points += [(name, rank, "after", count - 1) for name, rank, count in ranks]
    with ThreadPoolExecutor(2) as two:
        return list(two.map(lambda point: (point[0], killed(launcher, *point)), points))


def killed(launcher: Launcher, name: str, rank: int, when: str, number: int) -> Path:
    """The directory of a launch that was killed there."""
    root = launcher.cwd / f"{name}-{rank}-{when}-{number}"
    shutil.copytree(launcher.cwd / "base" / name, root)
    outcome = launcher(RANKS, *PROGRAM, root, "kill", name, rank, when, number)
    assert outcome.status != 0, f"{root.name} was not killed"
    for note in root.glob("shared.*"):  # of MPICH, 4 MB a killed job
        for path in note.read_text().split():
            Path(path).unlink(missing_ok=True)
    return root


def restart(launcher: Launcher, entries: list[tuple[Path, str, list[list]]]) -> None:
    (launcher.cwd / "list.json").write_text(json.dumps([(str(root), *rest) for root, *rest in entries]))
    launcher(RANKS, *PROGRAM, launcher.cwd, "restart", "list.json").check()


def is_visible(root: Path, name: str) -> bool:
    """Whether any node has the manifest of the save that was interrupted."""
    if name.startswith("save"):
        return any(root.glob("nodes/*/step_00000003/manifest.json"))
    before = (root.parent / "base" / name / "nodes/a/step_00000002/manifest.json").read_bytes()
    return any(path.read_bytes() != before for path in root.glob("nodes/*/step_00000002/manifest.json"))


def test_killed_in_a_save_a_restart_finds_what_was_reported_even_without_the_nodes_that_may_be_lost(launcher):
    entries = []
    for name, root in sweep(launcher, SAVES):
        new = LATER if name.startswith("again") else [3, "new"]
        reported = (root / "reported").exists()
        fewer = root.with_name(f"{root.name}-lost")
        shutil.copytree(root, fewer)
        for node in LOST[name]:
            shutil.rmtree(fewer / "nodes" / node)
        entries.append((root, name, [new] if reported or is_visible(root, name) else [OLD]))
        entries.append((fewer, name, [new] if reported else [OLD, new]))
    restart(launcher, entries)


def test_killed_while_a_launch_makes_steps_whole_the_next_one_finds_the_newest(launcher):
    newest = {"settle-again": LATER}
    restart(launcher, [(root, name, [newest.get(name, OLD)]) for name, root in sweep(launcher, RESTORES)])
