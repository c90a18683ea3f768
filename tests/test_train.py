"""The main job: it trains, saves, resumes bit for bit, survives kills, and fails loudly on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.launch import HANG, ROOT, mpirun

RANKS = 3


def rows(run_dir: Path) -> dict[int, dict]:
    """The last row of each step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in lines if "event" not in row}


def losses(run_dir: Path) -> dict[int, str]:
    return {step: row["loss"].hex() for step, row in rows(run_dir).items()}


def events(run_dir: Path, name: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row.get("event") == name]


def step_dir(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def arrays(run_dir: Path, step: int) -> dict[str, bytes]:
    """The global arrays of a step, read with plain h5py in rank order."""
    found: dict[str, bytes] = {}
    for path in sorted(step_dir(run_dir, step).glob("rank*.h5")):
        with h5py.File(path) as file:
            for key, dataset in file["arrays"].items():
                found[key] = found.get(key, b"") + dataset[...].tobytes()
    return found


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """20 steps of the default configuration, never interrupted."""
    from tests.launch import Launcher

    cwd = tmp_path_factory.mktemp("reference")
    outcome = Launcher(cwd).train(RANKS, "--run-dir", "run").check()
    return cwd / "run", outcome


def test_the_default_run_trains_saves_and_verifies(reference):
    run_dir, outcome = reference
    assert "resume verified: step 20" in outcome.stdout
    steps = rows(run_dir)
    assert list(steps) == list(range(1, 21))
    assert set(steps[1]) == {
        "step", "loss", "lr", "param_norm", "grad_norm", "step_seconds", "communication_seconds", "tokens_per_second",
        "time",
    }  # fmt: skip
    first, last = ([steps[s]["loss"] for s in window] for window in (range(1, 6), range(16, 21)))
    assert np.mean(last) < np.mean(first) - 0.3
    assert [event["step"] for event in events(run_dir, "checkpoint")] == [10, 20]
    assert [event["step"] for event in events(run_dir, "commit")] == [10, 20]
    assert len(re.findall(r"^ +\d+ +\d\.\d{4} +3\.00e-03 ", outcome.stdout, re.M)) == 20


def test_the_shards_are_plain_hdf5_and_the_digests_those_of_sha256sum(reference):
    run_dir, _ = reference
    manifest = json.loads((step_dir(run_dir, 20) / "manifest.json").read_text())
    assert manifest["world_size"] == RANKS
    assert [shard["rank"] for shard in manifest["shards"]] == [0, 1, 2]
    total = {"param": 0, "master": 0, "m": 0, "v": 0}
    for shard in manifest["shards"]:
        path = step_dir(run_dir, 20) / shard["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
        assert path.stat().st_size == shard["nbytes"]
        with h5py.File(path) as file:
            assert file.attrs["rank"] == shard["rank"]
            assert {k: d.dtype.str for k, d in file["arrays"].items()} == {
                "param": "<f2", "master": "<f4", "m": "<f4", "v": "<f4",
            }  # fmt: skip
            for key in total:
                assert file["arrays"][key].attrs["start"][0] == shard["param_shard_offset"]
                total[key] += file["arrays"][key].size
    assert total == dict.fromkeys(total, 30080)
    assert manifest["index"]["blocks.0.qkv.weight"] == {"start": 2624, "shape": [96, 32]}
    h5dump = shutil.which("h5dump")
    if h5dump:
        subprocess.run([h5dump, "-H", str(step_dir(run_dir, 20) / "rank00000.h5")], check=True, capture_output=True)


def test_stopping_and_resuming_is_bit_identical(reference, launch):
    run_dir = launch.cwd / "run"
    launch.train(RANKS, "--run-dir", "run", "--stop-at", "10").check()
    assert list(rows(run_dir)) == list(range(1, 11))
    outcome = launch.train(RANKS, "--run-dir", "run").check()
    assert "after step 10" in outcome.stdout
    assert losses(run_dir) == losses(reference[0])
    assert arrays(run_dir, 20) == arrays(reference[0], 20)
    outcome = launch.train(RANKS, "--run-dir", "run").check()
    assert "nothing to train" in outcome.stdout


@pytest.mark.parametrize("victims", ["one", "all"])
def test_a_kill_at_a_random_moment_loses_nothing(reference, launch, victims):
    rng = random.Random(victims)
    command = "-m", "mpi_ckpt.train", "--run-dir", "run", "--ckpt-every", "2steps"
    log = launch.cwd / "run" / "metrics.jsonl"
    for _ in range(6):
        before = log.read_text().count("grad_norm") if log.exists() else 0
        goal = before + rng.randrange(1, 7)
        job = launch.start(RANKS, *command)
        deadline = time.monotonic() + HANG
        while job.process.poll() is None and time.monotonic() < deadline:
            if log.exists() and log.read_text().count("grad_norm") >= goal:
                break
            time.sleep(0.001)
        ranks = job.ranks()
        for pid in ranks if victims == "all" else rng.sample(ranks, min(1, len(ranks))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outcome = job.wait()
        if outcome.status == 0:
            break
    launch.train(RANKS, *command[2:]).check()
    assert losses(launch.cwd / "run") == losses(reference[0])
    assert arrays(launch.cwd / "run", 20) == arrays(reference[0], 20)


def broken(reference, launch) -> Path:
    shutil.copytree(reference[0], launch.cwd / "run")
    return launch.cwd / "run"


def check_failure(outcome, *words: str) -> None:
    assert outcome.status != 0
    for rank in range(RANKS):
        lines = [line for line in outcome.stderr.splitlines() if line.startswith(f"[rank {rank}] error:")]
        assert len(lines) == 1, outcome.stderr
        for word in words:
            assert word in lines[0], (word, lines[0])


def test_another_world_size_is_refused_on_every_rank(reference, launch):
    broken(reference, launch)
    outcome = launch.train(2, "--run-dir", "run", "--steps", "30")
    assert outcome.status != 0
    for rank in range(2):
        assert any(
            line.startswith(f"[rank {rank}] error:") and "found 3 ranks" in line and "expected 2 ranks" in line
            for line in outcome.stderr.splitlines()
        ), outcome.stderr


def test_a_missing_shard_is_named_on_every_rank(reference, launch):
    run_dir = broken(reference, launch)
    (step_dir(run_dir, 20) / "rank00002.h5").unlink()
    outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "30")
    check_failure(outcome, "rank00002.h5", "rank 2", "found no such file", "expected")


@pytest.mark.parametrize("change", ["cut", "grow", "flip"])
def test_a_damaged_shard_is_named_on_every_rank(reference, launch, change):
    run_dir = broken(reference, launch)
    path = step_dir(run_dir, 20) / "rank00001.h5"
    data = bytearray(path.read_bytes())
    if change == "cut":
        del data[-4:]
    elif change == "grow":
        data += b"1234"
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "30")
    check_failure(outcome, "rank00001.h5", "rank 1", "found", "expected")
    # Asked to, it goes back to the step before, and says so.
    outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "30", "--on-damage", "older").check()
    assert "after step 10" in outcome.stdout
    assert "step_00000020 is damaged" in outcome.stderr
    assert rows(run_dir)[20]["loss"] == rows(reference[0])[20]["loss"]


def test_when_no_intact_step_is_left_the_run_does_not_start_afresh(reference, launch):
    run_dir = broken(reference, launch)
    for step in (10, 20):
        (step_dir(run_dir, step) / "rank00000.h5").unlink()
    for _ in range(2):  # the steps are set aside by the first launch; the second must not take that for a new run
        outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "30", "--on-damage", "older")
        check_failure(outcome, "no intact step is left", "found", "expected")


def test_settings_belong_to_the_run(reference, launch):
    broken(reference, launch)
    for flags in (["--n-embd", "64"], ["--lr", "1e-2"], ["--batch", "2"]):
        outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "30", *flags)
        check_failure(outcome, flags[0].lstrip("-").replace("-", "_").removeprefix("global_"), "found", "expected")
    # More steps are allowed: the learning rate does not depend on their number.
    launch.train(RANKS, "--run-dir", "run", "--steps", "21", "--batch", "4").check()


def test_changed_data_are_refused_and_moved_data_are_not(launch):
    text = bytes(range(97, 123)) * 100
    (launch.cwd / "text.txt").write_bytes(text)
    flags = "--run-dir", "run", "--data"
    launch.train(RANKS, *flags, "text.txt", "--vocab-size", "256", "--steps", "2").check()
    (launch.cwd / "text.txt").rename(launch.cwd / "moved.txt")
    launch.train(RANKS, *flags, "moved.txt", "--steps", "3").check()
    (launch.cwd / "moved.txt").write_bytes(text[:-1] + b"A")
    check_failure(launch.train(RANKS, *flags, "moved.txt", "--steps", "4"), "not those that the run", "moved.txt")


def test_resume_never_and_resume_step(reference, launch):
    run_dir = broken(reference, launch)
    check_failure(launch.train(RANKS, "--run-dir", "run", "--resume", "never"), "--resume never")
    check_failure(launch.train(RANKS, "--run-dir", "run", "--resume", "10"), "--discard-later")
    check_failure(launch.train(RANKS, "--run-dir", "run", "--resume", "15"), "step 15")
    (step_dir(run_dir, 20) / "rank00000.h5").unlink()  # not needed: step 20 is to be discarded
    launch.train(RANKS, "--run-dir", "run", "--resume", "10", "--discard-later").check()
    assert losses(run_dir) == losses(reference[0])
    assert arrays(run_dir, 20) == arrays(reference[0], 20)


def test_a_run_goes_on_with_other_numbers_of_ranks(reference, launch):
    run_dir = launch.cwd / "run"
    launch.train(RANKS, "--run-dir", "run", "--stop-at", "7").check()
    launch.train(4, "--run-dir", "run", "--stop-at", "13", "--elastic").check()
    launch.train(1, "--run-dir", "run", "--elastic").check()
    mine, theirs = rows(run_dir), rows(reference[0])
    assert list(mine) == list(theirs)
    np.testing.assert_allclose([mine[s]["loss"] for s in mine], [theirs[s]["loss"] for s in mine], rtol=1e-4)


def test_synchronous_and_asynchronous_saves_are_the_same(reference, launch):
    launch.train(RANKS, "--run-dir", "run", "--no-async-io").check()
    assert losses(launch.cwd / "run") == losses(reference[0])
    assert arrays(launch.cwd / "run", 10) == arrays(reference[0], 10)


def test_every_rank_continues_its_own_random_stream(launch):
    flags = "--token-noise", "0.2", "--steps", "6", "--ckpt-every", "3steps"
    launch.train(3, "--run-dir", "whole", *flags).check()
    launch.train(3, "--run-dir", "parts", *flags, "--stop-at", "3").check()
    launch.train(3, "--run-dir", "parts", *flags).check()
    assert losses(launch.cwd / "parts") == losses(launch.cwd / "whole")
    launch.train(3, "--run-dir", "quiet", "--steps", "6").check()
    assert losses(launch.cwd / "quiet") != losses(launch.cwd / "whole")


def test_a_torn_last_line_of_the_metrics_is_cut(launch):
    launch.train(2, "--run-dir", "run", "--stop-at", "2").check()
    with (launch.cwd / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')
    launch.train(2, "--run-dir", "run", "--steps", "4").check()
    assert sorted(rows(launch.cwd / "run")) == [1, 2, 3, 4]


def test_an_exception_on_one_rank_ends_the_job(launch):
    (launch.cwd / "program.py").write_text(
        "from mpi4py import MPI\n"
        "from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions\n"
        "comm = MPI.COMM_WORLD\n"
        "abort_on_uncaught_exceptions(comm)\n"
        "if comm.rank == 1:\n"
        "    raise RuntimeError('one rank only')\n"
        "comm.Barrier()\n"
        "import time; time.sleep(3600)\n"
    )
    outcome = launch(3, "program.py")
    assert outcome.status != 0
    assert "one rank only" in outcome.stderr


def test_ctrl_c_ends_the_job_within_seconds(launch):
    job = launch.start(RANKS, "-m", "mpi_ckpt.train", "--run-dir", "run", "--steps", "1000000")
    deadline = time.monotonic() + HANG
    while not (launch.cwd / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    outcome = job.wait()
    assert outcome.status != 0
    assert time.monotonic() - began < 30


def test_a_terminal_gets_a_progress_bar_and_a_log_does_not(reference, launch):
    assert "\x1b" not in reference[1].stdout
    leader, follower = pty.openpty()
    command = [mpirun(), "-n", "2", sys.executable, "-m", "mpi_ckpt.train", "--run-dir", "run", "--steps", "200"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    job = subprocess.Popen(command, cwd=launch.cwd, env=env, stdout=follower, stdin=follower, start_new_session=True)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # EIO when the last writer has closed its end
        while chunk := os.read(leader, 65536):
            shown += chunk
    os.close(leader)
    assert job.wait(HANG) == 0
    assert "━".encode() in shown
    assert b"resume verified" in shown


def test_bad_usage_is_said_once(launch):
    outcome = launch.train(RANKS, "--no-such-flag")
    assert outcome.status == 2
    assert outcome.stderr.count("unrecognized arguments") == 1
    assert "expected an integer of at least 1" in launch.train(2, "--steps", "abc").stderr
    for flags in (["--lr", "-1"], ["--ckpt-every", "sometimes"]):
        outcome = launch.train(2, "--run-dir", "run", *flags)
        assert outcome.status != 0
        assert "expected" in outcome.stderr
        assert "Traceback" not in outcome.stderr
