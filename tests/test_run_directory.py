"""A run's directory: what a launch finds in it decides what it may do, and what it cannot do it refuses at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from mpi_ckpt import CheckpointError, RemoteRefused, cli
from mpi_ckpt.checkpoint.checkpointer import Checkpointer
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.run_file import same_run
from mpi_ckpt.train import console, run_copies, status
from mpi_ckpt.train.config import ConfigError, Options
from mpi_ckpt.train.metrics import MetricsFailed, MetricsLog
from tests.checkpoints import flip, raised
from tests.launch import Launcher
from tests.ranks import contents
from tests.tool_cases import verb
from tests.training import events, losses, wait_for_step

RANKS = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The directory of a finished run."""
    cwd = tmp_path_factory.mktemp("reference")
    Launcher(cwd).train(RANKS, "--run-dir", "run").check()
    return cwd / "run"


def test_settings_belong_to_the_run_before_anything_is_committed_too(launch):
    killed = launch.train(RANKS, "--run-dir", "run", "--ckpt-every", "100steps", "--inject", "kill:8:1")
    assert killed.status != 0
    again = launch.train(RANKS, "--run-dir", "run", "--seed", "1")
    assert again.status == 2
    assert "seed is not what this run was started with" in again.stderr
    launch.train(1, "--run-dir", "run", "--elastic", "--stop-at", "2").check()
    assert json.loads((launch.cwd / "run" / "run.json").read_text())["settings"]["global_batch"] == 8


def test_what_a_launch_cannot_do_is_refused_before_anything_is_made(launch):
    for flags in (["--n-head", "5"], ["--resume", "5"], ["--tensor-parallel", "2", "--n-head", "1"], ["--data", "no"]):
        outcome = launch.train(RANKS, "--run-dir", "run", *flags)
        assert outcome.status == 2, outcome.stderr
        assert "expected" in outcome.stderr
        assert "Traceback" not in outcome.stderr
        assert not (launch.cwd / "run").exists(), flags
    outcome = launch.train(1, "--run-dir", "run", "--discard-later")
    assert outcome.status == 2
    assert "--resume STEP" in outcome.stderr


def test_a_run_is_not_shortened_to_before_its_newest_step(reference, launch):
    shutil.copytree(reference, launch.cwd / "run")
    outcome = launch.train(RANKS, "--run-dir", "run", "--steps", "15")
    assert outcome.status == 2
    assert "found --steps 15, and step 20 is committed" in outcome.stderr
    assert json.loads((launch.cwd / "run" / "run.json").read_text())["steps"] == 20


def test_what_reshard_writes_the_trainer_takes_as_its_own_and_a_bare_root_it_refuses(reference, launch):
    run = launch.cwd / "run"
    assert cli.main(["reshard", str(reference), "--ranks", "3", "--out", str(run / "checkpoints")]) == 0
    shutil.copy(reference / "run.json", run)
    launch.train(3, "--run-dir", "run", "--steps", "22").check()
    bare = launch.cwd / "bare"
    assert cli.main(["reshard", str(reference), "--ranks", "3", "--out", str(bare)]) == 0
    outcome = launch.train(3, "--run-dir", "bare")
    assert outcome.status == 2
    assert "a root of checkpoints, not a run's directory" in outcome.stderr
    assert "move the step directories into bare/checkpoints and copy the run's run.json into bare" in outcome.stderr
    (bare / "checkpoints").mkdir()
    for step in bare.glob("step_*"):
        step.rename(bare / "checkpoints" / step.name)
    shutil.copy(reference / "run.json", bare)
    launch.train(3, "--run-dir", "bare", "--steps", "22").check()


def test_a_run_whose_directory_is_lost_goes_on_from_the_nodes_with_their_copy_of_its_file(launch):
    flags = "--run-dir", "demo", "--local", "nodes/{domain}", "--ckpt-every", "5steps"
    env = {"MPI_CKPT_DOMAIN": "n{rank}"}
    launch.train(RANKS, *flags, "--steps", "12", env=env).check()
    before = (launch.cwd / "demo" / "run.json").read_bytes()
    shutil.rmtree(launch.cwd / "demo")
    assert launch.train(RANKS, *flags, "--steps", "20", env=env).status == 2
    (launch.cwd / "demo").mkdir()
    shutil.copy(launch.cwd / "nodes" / "n1" / "demo" / "run.json", launch.cwd / "demo")
    assert (launch.cwd / "demo" / "run.json").read_bytes() == before
    assert "after step 12 from the nodes" in launch.train(RANKS, *flags, "--steps", "20", env=env).check().stdout
    launch.train(RANKS, "--run-dir", "whole", "--steps", "12").check()
    launch.train(RANKS, "--run-dir", "whole", "--steps", "20").check()
    assert losses(launch.cwd / "demo") == {s: x for s, x in losses(launch.cwd / "whole").items() if s > 12}


def test_two_runs_of_one_name_that_meet_on_the_nodes_are_told_apart(launch):
    flags = "--local", "nodes/{domain}", "--redundancy", "single", "--steps", "2"
    env = {"MPI_CKPT_DOMAIN": "n{rank}"}
    launch.train(RANKS, "--run-dir", "a/demo", *flags, env=env).check()
    outcome = launch.train(RANKS, "--run-dir", "b/demo", *flags, env=env)
    assert outcome.status == 2
    assert "a run of this name has steps on the nodes already" in outcome.stderr
    assert "steps beside nodes/n0/demo/run.json" in outcome.stderr
    assert "another --local, or another name to --run-dir" in outcome.stderr
    assert not (launch.cwd / "b").exists()
    launch.train(RANKS, "--run-dir", "b/other", *flags, env=env).check()


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        ({"restore": {"tier": "shared"}}, " from the shared directory"),
        ({"restore": {"tier": "remote"}, "rebuild": {"step": 5, "rebuilt": ["a"]}}, " from the remote tier"),
        ({"restore": {"tier": "local"}, "rebuild": {"step": 4, "rebuilt": ["a"]}}, " from the nodes"),
        ({"restore": {"tier": "local"}, "rebuild": {"step": 5, "rebuilt": []}}, " from the nodes"),
        ({"restore": {"tier": "local"}, "rebuild": {"step": 5, "rebuilt": ["a"]}}, " from the nodes; rebuilt a"),
        (
            {"restore": {"tier": "local"}, "rebuild": {"step": 5, "rebuilt": [*"abcdef"]}},
            " from the nodes; rebuilt a, b, c, d and 2 more",
        ),
        (
            {
                "restore": {"tier": "local"},
                "local_loss": {"step": 5, "fetched": {"remote": ["b"], "shared": ["a", "c"]}},
            },
            " from the nodes; b from the remote tier; a, c from the shared directory",
        ),
        ({"restore": {"tier": "local"}, "local_loss": {"step": 9, "fetched": {}}}, " from the nodes"),
        ({"restore": {"tier": "shared"}, "local_loss": {"step": 5, "fetched": {}}}, " from the shared directory"),
    ],
)
def test_where_a_launch_goes_on_names_the_tier_and_what_was_rebuilt_of_that_step(happened, said):
    assert console.resumed(Path("runs/c"), 5, happened) == f"resumed runs/c after step 5{said}"


def test_the_upload_keeps_to_the_bandwidth_that_the_flag_gives(reference, launch):
    """At 1 KB a second and rank, nothing is up there when a launch that is asked to leave stops waiting for it."""
    run = shutil.copytree(reference, launch.cwd / "run")
    train = "-m", "mpi_ckpt.train", "--run-dir", "run", "--steps", "1000000", "--ckpt-every", "1h"
    train += "--remote", f"file://{launch.cwd}/far", "--remote-bandwidth"
    job = launch.start(RANKS, *train, "1KB")
    wait_for_step(job, run, 25)
    (run / "halt").touch()
    assert job.wait().status == 75, job.output()
    assert not list((launch.cwd / "far").rglob("upload_manifest.json"))
    launch(RANKS, *train, "1GiB", "--stop-at", "20").check()
    assert len(list((launch.cwd / "far").rglob("upload_manifest.json"))) >= 2


def test_bytes_a_second_are_read_with_decimal_and_binary_units():
    sizes = {"50MB": 50e6, "1GiB": 2**30, "1.5 kb": 1500, "7": 7}
    for text, nbytes in sizes.items():
        assert Options(remote="file:///far", remote_bandwidth=text).remote_bytes_per_second == nbytes
    assert Options().remote_bytes_per_second is None
    for wrong in ("", "fast", "-1MB", "0", "5 parsecs"):
        with pytest.raises(ConfigError, match="remote_bandwidth"):
            Options(remote="file:///far", remote_bandwidth=wrong)


def test_going_on_from_an_older_step_leaves_an_event(reference, launch):
    run = shutil.copytree(reference, launch.cwd / "run")
    flip(run / "checkpoints" / "step_00000020" / "rank00001.h5", -1)
    launch.train(RANKS, "--run-dir", "run", "--steps", "21", "--on-damage", "older").check()
    damage = events(run, "damage")
    assert [event["step"] for event in damage] == [20]
    assert "rank00001.h5" in damage[0]["error"]


def test_a_log_that_cannot_be_written_says_where_and_leaves_no_half_line(tmp_path, monkeypatch):
    with MetricsLog(tmp_path) as log:
        log.write({"step": 1})
        genuine = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: genuine(fd, data[:5]))  # a disk that is nearly full
        with pytest.raises(MetricsFailed, match="No space left") as caught:
            log.write({"step": 2})
        monkeypatch.undo()
        assert caught.value.path == str(tmp_path / "metrics.jsonl")
        log.write({"step": 3})
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 3]


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_that_cannot_be_discarded_is_an_error_for_a_restart_would_take_it(comm, shared_path, monkeypatch):
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"n": step})
        checkpointer.wait_until_finished()
        genuine = os.unlink

        def denied(path, *args, **kwargs):
            if str(path).endswith("step_00000003/manifest.json"):
                raise PermissionError(13, "Permission denied", str(path))
            return genuine(path, *args, **kwargs)

        monkeypatch.setattr(os, "unlink", denied)
        error = raised(comm, CheckpointError, lambda: checkpointer.discard_after(1))
        assert "step 3 cannot be deleted" in str(error)
        monkeypatch.undo()
        assert checkpointer.all_steps() == [1, 2, 3], "the highest first: no lower one is gone yet"
        assert checkpointer.discard_after(1) == [3, 2]
        assert checkpointer.all_steps() == [1]


def test_a_launch_that_waited_while_another_began_the_run_trains_on_that_one_s_data(launch):
    launch.train(RANKS, "--run-dir", "whole", "--seed", "5").check()
    launch.train(RANKS, "--run-dir", "begun", "--seed", "5", "--stop-at", "10").check()
    run = launch.cwd / "run"
    (run / "checkpoints").mkdir(parents=True)
    with open(run / "checkpoints" / "writer.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        job = launch.start(RANKS, "-m", "mpi_ckpt.train", "--run-dir", "run")
        while not any(has_open(pid, "writer.lock") for pid in job.ranks()):  # it has planned a run of its own by then
            assert job.process.poll() is None, job.output()
            time.sleep(0.01)
        shutil.copytree(launch.cwd / "begun", run, dirs_exist_ok=True, ignore=shutil.ignore_patterns("writer.lock"))
    job.wait().check()
    assert losses(run) == losses(launch.cwd / "whole")


def has_open(pid: int, name: str) -> bool:
    try:
        return any(os.readlink(path).endswith(name) for path in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it ends, or a file has just been closed
        return False


# -- a tier is one run's ----------------------------------------------------------------------------------------------


@pytest.fixture
def two_runs(launch):
    """The runs e, which has uploaded steps 10 and 20, and f, with another seed and steps of its own."""
    far = f"file://{launch.cwd}/far"
    launch.train(
        2, "--run-dir", "e", "--seed", "1", "--steps", "20", "--ckpt-every", "10steps", "--remote", far
    ).check()
    launch.train(2, "--run-dir", "f", "--seed", "2", "--steps", "10").check()
    return far, contents(launch.cwd / "far")


def test_the_remote_tier_of_another_run_is_refused_and_left_as_it_is(launch, two_runs):
    far, before = two_runs
    outcome = launch.train(2, "--run-dir", "f", "--steps", "30", "--remote", far)
    assert outcome.status == status.USAGE
    assert "a tier holds another run's steps" in outcome.stderr
    for name in ("push", "pull"):
        said = verb(name, launch.cwd / "f", "--remote", far)
        assert (said.status, "the remote tier is another run's" in said.err) == (2, True), said
    assert contents(launch.cwd / "far") == before
    assert verb("push", launch.cwd / "e" / "checkpoints", "--remote", far).status == 0


def test_a_new_directory_does_not_become_that_of_a_run_whose_settings_it_contradicts(launch, two_runs):
    far, before = two_runs
    outcome = launch.train(2, "--run-dir", "g", "--seed", "3", "--remote", far)
    assert outcome.status == status.USAGE
    assert "seed is not what this run was started with" in outcome.stderr
    assert not (launch.cwd / "g").exists()
    assert contents(launch.cwd / "far") == before


def test_a_run_that_was_made_longer_is_the_same(launch, two_runs):
    launch.train(2, "--run-dir", "e", "--steps", "24", "--remote", two_runs[0]).check()
    assert json.loads((launch.cwd / "far" / "run.json").read_text())["steps"] == 24


def test_the_steps_of_a_run_of_the_same_name_on_the_nodes_are_refused(launch):
    def train(run_dir, *more):
        env = {"MPI_CKPT_DOMAIN": "{rank}"}
        return launch.train(2, "--run-dir", run_dir, "--local", f"{launch.cwd}/n/{{domain}}", *more, env=env)

    train("run", "--seed", "1", "--steps", "10").check()
    launch.train(2, "--run-dir", "x/run", "--seed", "2", "--steps", "5").check()
    outcome = train("x/run", "--steps", "20")
    assert outcome.status == status.USAGE
    assert "a tier holds another run's steps" in outcome.stderr
    for copy in (launch.cwd / "n").glob("*/run/run.json"):  # as on nodes that only older launches have used
        copy.unlink()
    outcome = train("x/run", "--steps", "20")
    assert outcome.status == status.USAGE
    assert "seed 1; expected" in outcome.stderr
    train("run", "--steps", "12").check()
    assert len(list((launch.cwd / "n").glob("*/run/run.json"))) == 2


@pytest.mark.parametrize("url", ["/tmp/far", "file://far", "s3://", "http://host/far"])
def test_a_remote_tier_whose_url_is_none_is_bad_usage(url):
    with pytest.raises(ConfigError, match="expected s3://bucket/prefix or file:///directory"):
        Options(remote=url)


def train_on_nodes(launch, run_dir, *more):
    env = {"MPI_CKPT_DOMAIN": "{rank}"}
    return launch.train(2, "--run-dir", run_dir, "--local", f"{launch.cwd}/n/{{domain}}", *more, env=env)


def test_two_runs_of_equal_settings_are_two(launch):
    far = f"file://{launch.cwd}/far"
    launch.train(2, "--run-dir", "e", "--steps", "20", "--remote", far).check()
    launch.train(2, "--run-dir", "f", "--steps", "10").check()
    before = contents(launch.cwd / "far")
    outcome = launch.train(2, "--run-dir", "f", "--steps", "30", "--remote", far)
    assert outcome.status == status.USAGE
    assert "found other settings, data or run_id" in outcome.stderr
    assert contents(launch.cwd / "far") == before
    (launch.cwd / "far" / "run.json").unlink()  # as after `push` of another program, or an older one
    before = contents(launch.cwd / "far")
    outcome = launch.train(2, "--run-dir", "f", "--steps", "30", "--remote", far)
    assert outcome.status == status.USAGE
    assert "found run_id" in outcome.stderr
    assert contents(launch.cwd / "far") == before
    launch.train(2, "--run-dir", "e", "--steps", "22", "--remote", far).check()
    assert (launch.cwd / "far" / "run.json").read_bytes() == (launch.cwd / "e" / "run.json").read_bytes()


def test_a_place_without_a_step_is_nobody_s(launch):
    far = launch.cwd / "far"
    far.mkdir()
    (far / "run.json").write_text(json.dumps({"run_id": "x", "settings": {"seed": 7}, "data": {}, "steps": 3}))
    launch.train(2, "--run-dir", "e", "--steps", "5", "--remote", f"file://{far}").check()
    assert (far / "run.json").read_bytes() == (launch.cwd / "e" / "run.json").read_bytes()


def test_a_remote_tier_is_compared_before_anything_goes_there(launch, two_runs):
    """As where it did not answer when the launch looked: `admit` is what uploads wait for."""
    far, before = two_runs
    store = open_store(far)
    with pytest.raises(RemoteRefused, match="another run's steps"):
        run_copies.admit(store, launch.cwd / "f")
    (launch.cwd / "far" / "run.json").unlink()
    with pytest.raises(RemoteRefused, match=r"found run_id .*, seed 1; expected run_id .*, seed 2"):
        run_copies.admit(store, launch.cwd / "f")
    run_copies.admit(store, launch.cwd / "e")
    assert contents(launch.cwd / "far") == before


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_damaged_copy_of_run_json_counts_for_nothing(launch, damage):
    train_on_nodes(launch, "run", "--steps", "10", "--remote", f"file://{launch.cwd}/far").check()
    (launch.cwd / "n/1/run/run.json").write_text(damage)
    (launch.cwd / "far/run.json").write_text(damage)
    train_on_nodes(launch, "run", "--steps", "12", "--remote", f"file://{launch.cwd}/far").check()
    for copy in (launch.cwd / "n/1/run/run.json", launch.cwd / "far/run.json"):
        assert copy.read_bytes() == (launch.cwd / "run/run.json").read_bytes()
    (launch.cwd / "run/run.json").write_text(damage)
    outcome = train_on_nodes(launch, "run", "--steps", "14", "--remote", f"file://{launch.cwd}/far")
    assert outcome.status == status.USAGE
    assert "the settings of the run cannot be read" in outcome.stderr
    assert "those in the remote tier and on the nodes" in outcome.stderr


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"settings": {"seed": 1}, "data": {}, "steps": 9}, True),
        ({"settings": {"seed": 1, "new": 3}, "data": {}}, True),
        ({"settings": {"seed": 1, "data": "/moved"}, "data": {}}, True),
        ({"settings": {"seed": 2}, "data": {}}, False),
        ({"settings": {"seed": 1, "model": {"n_embd": 64}}, "data": {}}, True),
        ({"settings": {"seed": 1}, "data": {"sha256": "b"}}, True),
        ({"settings": {"seed": 1}}, False),
        ({"settings": [], "data": {}}, False),
        ({"settings": {"seed": 1}, "data": {}, "run_id": "b"}, False),
    ],
)
def test_what_makes_two_run_files_speak_of_one_run(other, same):
    mine = {"settings": {"seed": 1, "data": "here"}, "data": {}, "steps": 5, "run_id": "a"}
    assert same_run(json.dumps(mine).encode(), json.dumps(other).encode()) is same
    deep = {"settings": {"model": {"n_embd": 32}}, "data": {"sha256": "a"}}
    assert not same_run(json.dumps(deep).encode(), json.dumps(deep | {"data": {"sha256": "b"}}).encode())
    assert not same_run(json.dumps(deep).encode(), json.dumps(deep | {"settings": {"model": {"n_embd": 64}}}).encode())
    assert not same_run(b"{", json.dumps(deep).encode())
