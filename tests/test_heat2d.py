"""The example: killed and continued on other grids of ranks, its field is that of one plain array, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from math import pi, sin
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpi_ckpt.checkpoint.read import read
from mpi_ckpt.storage import names
from tests.checkpoints import same_bits
from tests.launch import HANG

SHAPE = (203, 117)
STEPS = 2000
EVERY = 50


def reference(shape: tuple[int, int], steps: int) -> np.ndarray:
    """The heat equation on one array, with the plate's cold edges as a frame of zeros."""
    i, j = np.indices(shape)
    hot = (i - shape[0] // 2) ** 2 + (j - shape[1] // 3) ** 2 < (0.3 * min(shape)) ** 2
    old = np.pad(np.where(hot, 100.0, 0.0), 1)
    new = old.copy()
    for _ in range(steps):
        around = old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:]
        new[1:-1, 1:-1] = old[1:-1, 1:-1] + 0.2 * (around - 4.0 * old[1:-1, 1:-1])
        old, new = new, old
    return old[1:-1, 1:-1]


def assembled(directory: Path, shape: tuple[int, int]) -> np.ndarray:
    """The field of a step, from its files by h5py alone."""
    field = np.full(shape, np.nan)
    for path in directory.glob("rank*.h5"):
        with h5py.File(path) as file:
            block = file["arrays/u"]
            (top, left), (rows, columns) = block.attrs["start"], block.shape
            field[top : top + rows, left : left + columns] = block[...]
    return field


def heat2d(run_dir: Path, *, shape: tuple[int, int] = SHAPE, steps: int = STEPS, every: int = EVERY) -> list[str]:
    options = ["--shape", "{},{}".format(*shape), "--steps", str(steps), "--every", f"{every}steps"]
    return ["-m", "mpi_ckpt.examples.heat2d", "--run-dir", str(run_dir), *options]


def kill_after(job, root: Path, step: int) -> int:
    """SIGKILL one rank once `step` is committed; the newest step that is left, which must not be the last one."""
    deadline = time.monotonic() + HANG
    while max(names.list_steps(root), default=0) < step:
        assert time.monotonic() < deadline, f"step {step} does not come\n{job.output()}"
        assert job.process.poll() is None, f"the job has ended\n{job.output()}"
        time.sleep(0.002)
    rank = job.ranks()[-1]
    shared = {line.split()[5] for line in Path(f"/proc/{rank}/maps").read_text().splitlines() if "mpich_shm" in line}
    os.kill(rank, signal.SIGKILL)
    assert job.wait().status != 0
    for path in shared:  # MPICH's, 4 MB a killed job
        Path(path).unlink(missing_ok=True)
    newest = max(names.list_steps(root))
    assert step <= newest < STEPS, "the kill came too late to test anything"
    return newest


def test_a_field_killed_twice_and_continued_on_other_grids_is_that_of_one_array_to_the_bit(launch, tmp_path):
    root = tmp_path / "run" / "checkpoints"
    arguments = heat2d(tmp_path / "run")
    on_2x2 = kill_after(launch.start(4, *arguments), root, STEPS // 4)
    on_3x1 = kill_after(launch.start(3, *arguments, "--elastic"), root, on_2x2 + STEPS // 8)
    last = launch(1, *arguments, "--elastic").check()
    assert f"from step {on_3x1} on 1 x 1 ranks" in last.stdout
    expected = reference(SHAPE, STEPS)
    assert same_bits(read(root, STEPS, "u"), expected)
    assert same_bits(assembled(names.step_dir(root, STEPS), SHAPE), expected)


@pytest.mark.parametrize(("ranks", "shape"), [(6, (7, 5)), (3, (57, 1)), (4, (2, 2))])
def test_uneven_and_single_cell_blocks_give_the_same_field(launch, tmp_path, ranks, shape):
    steps = 57  # of which 50 is saved because it is due, and the last because it is the last
    launch(ranks, *heat2d(tmp_path / "run", shape=shape, steps=steps, every=50)).check()
    root = tmp_path / "run" / "checkpoints"
    for step in (50, steps):
        expected = reference(shape, step)
        assert same_bits(assembled(names.step_dir(root, step), shape), expected)
    assert expected.any(), "a plate that is cold everywhere shows nothing"


def test_the_reported_heat_is_that_of_the_whole_plate(launch, tmp_path):
    output = launch(3, *heat2d(tmp_path / "run", steps=8)).check().stdout.splitlines()
    field = reference(SHAPE, 8)
    assert len(output) == 9
    assert output[-1].startswith("step 8, ")
    assert output[-1].endswith(f"heat {field.sum():.6g}, {field.min():.4g} to {field.max():.4g}")


def test_more_ranks_than_rows_or_columns_is_a_plain_error(launch, tmp_path):
    outcome = launch(4, *heat2d(tmp_path / "run", shape=(203, 1)))
    assert outcome.status != 0
    assert outcome.stderr.count("found 2 x 2 ranks for 203 x 1 cells") == 4, "every rank says why it leaves"
    assert "Traceback" not in outcome.stderr


def test_another_number_of_ranks_without_elastic_is_refused_and_changes_nothing(launch, tmp_path):
    launch(4, *heat2d(tmp_path / "run", steps=10)).check()
    outcome = launch(3, *heat2d(tmp_path / "run", steps=20))
    assert outcome.status != 0
    assert "found 4 ranks in the checkpoint; expected 3 ranks" in outcome.stderr
    assert "--elastic" in outcome.stderr
    assert names.list_steps(tmp_path / "run" / "checkpoints") == [10]


@pytest.mark.mpi(ranks=[1], timeout=30, unit="s")
def test_an_eigenmode_decays_at_the_rate_that_von_neumann_gives(comm):
    """sin(pi p i / (m+1)) sin(pi q j / (n+1)) shrinks by 1 - 4 R (sin^2(pi p/(2 (m+1))) + sin^2(pi q/(2 (n+1))))."""
    from mpi_ckpt.examples import heat2d

    (m, n), (p, q) = (57, 23), (3, 2)
    i, j = np.ogrid[0 : m + 2, 0 : n + 2]
    mode = np.sin(pi * p * i / (m + 1)) * np.sin(pi * q * j / (n + 1))
    padded = mode.copy()
    heat2d.advance(padded)
    rate = 1 - 4 * heat2d.R * (sin(pi * p / (2 * (m + 1))) ** 2 + sin(pi * q / (2 * (n + 1))) ** 2)
    np.testing.assert_allclose(padded[1:-1, 1:-1], rate * mode[1:-1, 1:-1], rtol=0, atol=1e-15)
    assert heat2d.DT <= heat2d.H**2 / (4 * heat2d.ALPHA)
