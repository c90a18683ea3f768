"""The house rules that tools can check: lint, format, types."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch import ROOT


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "."),
        ("mypy", "mpi_ckpt"),
    ],
    ids=" ".join,
)
def test_the_tree_is_clean(command):
    outcome = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
