"""The layers of the package: arrows point down only, and neither storage nor a verb ever starts MPI."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import HANG, ROOT

PACKAGE = ROOT / "mpi_ckpt"

# A module may import from the rooms of lower layers, and from its own room.
LAYER = {
    "cli": 6,
    "__main__": 7,
    "tools": 5,
    "train": 5,
    "examples": 5,
    "model": 4,
    "parallel": 4,
    "checkpoint": 4,
    "redundancy": 3,
    "storage": 2,
    "comm": 2,
    "layout": 1,
    "errors": 0,
}
MAY_IMPORT_MPI = ("comm", "train", "examples")  # at run time; anything may name its types


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Modules that are imported when the code runs: those under TYPE_CHECKING are not."""
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found = []
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "mpi_ckpt" and len(parts) > 1 and parts[1] in LAYER:
            lower = LAYER[parts[1]] < LAYER[room] or parts[1] == room
            assert lower, f"{path}: {room} imports {name}"
        if parts[0] == "mpi4py":
            assert room in MAY_IMPORT_MPI, f"{path}: {room} imports {name}"


def test_every_room_has_a_layer():
    assert {room_of(path) for path in modules()} <= LAYER.keys()


@pytest.mark.parametrize("code", ["import mpi_ckpt", "import mpi_ckpt.cli", "import mpi_ckpt; mpi_ckpt.ShardManifest"])
def test_neither_the_package_nor_a_verb_starts_mpi(code):
    check = f"{code}; import sys; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=HANG)


def test_the_top_level_is_what_the_readme_says():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in tracked.stdout.split()}
    plain = {name for name in top if not name.startswith(".")}
    assert plain <= {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "mpi_ckpt", "jobs", "tests", "benchmarks"}


def test_durable_operations_go_through_one_door():
    calls = {"fsync", "fdatasync", "rename", "replace", "renames", "unlink", "rmdir", "link", "symlink", "mkdir"}
    for path in modules():
        if path == PACKAGE / "storage" / "atomic.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in calls:
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner not in ("os", "shutil"), f"{path}:{node.lineno}: {owner}.{node.attr}"
