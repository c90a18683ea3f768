"""The second tier: launches that upload, are killed, meet a bad network, and come back from the far side alone."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mpi_ckpt.storage.remote_steps import committed_remotely, list_remote, read_upload_manifest
from mpi_ckpt.tools.verify import verify_remote
from tests.checkpoints import manifest_of
from tests.launch import ROOT
from tests.s3 import Remote

PROGRAM = ("-m", "tests.programs.uploader")


@pytest.fixture
def job(launch, remote, tmp_path):
    """Runs the program on ranks against the remote tier; gives what each rank says."""

    def start(ranks: int, *, root: Path | None = None, **task: Any) -> Any:
        about = {"root": str(root or tmp_path / "run"), "remote": remote.url} | task
        return launch.start(ranks, *PROGRAM, json.dumps(about), env=remote.env)

    def run(ranks: int, timeout: float = 90, **task: Any) -> list[dict[str, Any]]:
        return outcome(start(ranks, **task), timeout)

    run.start = start
    return run


def outcome(job, timeout: float = 90) -> list[dict[str, Any]]:
    return json.loads(job.wait(timeout).check().stdout.strip().splitlines()[-1])


def events(said: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind, which every rank has seen for the same steps in the same order."""
    found = [[e for e in rank["events"] if e["event"] == kind] for rank in said]
    assert all([e["step"] for e in each] == [e["step"] for e in found[0]] for each in found)
    return found[0]


def steps(said: list[dict[str, Any]], kind: str) -> list[int]:
    return [e["step"] for e in events(said, kind)]


def until(running, condition: Callable[[], bool], timeout: float = 60) -> None:
    """Wait for something while a job runs."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, running.output()
        assert running.process.poll() is None, running.output()
        time.sleep(0.05)


def is_whole(remote: Remote, *expected: int) -> bool:
    """Whether exactly these steps are remotely committed, and every byte of them is right."""
    assert committed_remotely(remote.store) == [*expected]
    verdicts = [*verify_remote(remote.store, expected)]
    return [v.step for v in verdicts] == [*expected] and all(v.intact for v in verdicts)


def local_steps(root: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in root.glob("step_*/manifest.json"))


# -- commit ----------------------------------------------------------------------------------------------------------


def test_every_committed_step_is_uploaded_and_comes_back_on_another_number_of_ranks(job, remote, tmp_path):
    said = job(2, save=[10, 20])
    assert steps(said, "upload") == [10, 20]
    assert is_whole(remote, 10, 20)
    (back, *_) = job(3, root=tmp_path / "empty", restore=True)
    assert back["restored"] == 20
    assert local_steps(tmp_path / "empty") == []


def test_the_upload_manifest_is_the_local_one_with_the_remote_paths(job, remote, tmp_path):
    job(2, save=[10])
    document, _ = remote.store.get("step_00000010/upload_manifest.json")
    far, near = json.loads(document), manifest_of(tmp_path / "run", 10)
    save_id = near["save_id"]
    assert far.pop("remote_paths") == [f"step_00000010/{save_id}/rank0000{r}.h5" for r in range(2)]
    assert far.pop("manifest_sha256") != near.pop("manifest_sha256")
    assert far == near
    assert sorted(remote.store.list()) == [
        *(f"step_00000010/{save_id}/rank0000{r}.h5" for r in range(2)),
        "step_00000010/upload_manifest.json",
    ]


def test_a_reader_sees_a_step_only_when_every_shard_is_there(job, remote):
    if remote.proxy:
        chance = random.Random(1)
        remote.proxy.decide = lambda request: chance.uniform(0, 0.4) if request.method in ("PUT", "POST") else None
    running, seen = job.start(2, save=[10, 20, 30], options={"keep": 3, "remote_bandwidth": 1e6}), []
    while running.process.poll() is None:
        for step, listed in list_remote(remote.store).items():
            if listed.committed:
                assert len(listed.shards) == 2
                seen.append(step)
    outcome(running)
    assert seen == [s for s in (10, 20, 30) for _ in range(seen.count(s))] or set(seen) <= {10, 20, 30}
    assert is_whole(remote, 10, 20, 30)


def test_before_its_manifest_a_step_is_not_there_and_a_restore_takes_the_one_before(job, s3, launch, tmp_path):
    remote = s3
    held = 30.0
    remote.proxy.decide = lambda request: held if request.puts("step_00000020/upload_manifest") else None
    about = {"root": str(tmp_path / "run"), "remote": remote.url, "save": [10, 20]}
    running = launch.start(2, *PROGRAM, json.dumps(about), env=remote.env)
    until(running, lambda: any(r.puts("step_00000020/upload_manifest") for r in remote.proxy.requests))
    assert len(list_remote(remote.store)[20].shards) == 2
    back = launch(2, *PROGRAM, json.dumps({**about, "root": str(tmp_path / "e"), "save": [], "restore": True,
                  "options": {"read_only": True}}), env=remote.env).check()  # fmt: skip
    assert json.loads(back.stdout)[0]["restored"] == 10
    running.end()


def test_a_repeated_step_never_puts_bytes_under_a_live_manifest(job, remote):
    job(2, save=[10])
    first = read_upload_manifest(remote.store, 10)
    assert steps(job(2, save=[10], overwrite=True, seed=5), "upload") == [10]
    second = read_upload_manifest(remote.store, 10)
    assert second.save_id != first.save_id
    assert is_whole(remote, 10)
    assert all(second.save_id in key for key in list_remote(remote.store)[10].shards), "the old ones are gone"
    if remote.proxy:
        keys = [r.path.partition("?")[0] for r in remote.proxy.requests if r.method == "PUT" and "partNumber" in r.path]
        assert len({key for key in keys if first.save_id in key} & {key for key in keys if second.save_id in key}) == 0


def test_a_restore_on_more_ranks_reads_the_ranges_that_it_needs_and_no_more(launch, s3, tmp_path):
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "elements": 3_000_000}
    outcome(launch.start(2, *PROGRAM, json.dumps({**about, "save": [10]}), env=s3.env))
    nbytes = sum(shard["nbytes"] for shard in manifest_of(tmp_path / "run", 10)["shards"])
    before = len(s3.proxy.requests)
    again = {**about, "root": str(tmp_path / "empty"), "restore": True}
    assert outcome(launch.start(3, *PROGRAM, json.dumps(again), env=s3.env))[0]["restored"] == 10
    gets = [r for r in s3.proxy.requests[before:] if r.method == "GET" and r.path.endswith(".h5")]
    # Two borders between the new ranks' parts: on each a chunk of 1 MiB, at most, is read by both sides.
    assert nbytes * 0.99 < sum(r.received for r in gets) < nbytes + 3 * (1 << 20)


def test_an_mpi_without_threads_is_told_to_push(launch, s3, tmp_path):
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10]}
    serialized = {**s3.env, "MPI4PY_RC_THREAD_LEVEL": "serialized"}
    said = outcome(launch.start(2, *PROGRAM, json.dumps(about), env=serialized))
    assert all(rank["error"].startswith("RemoteRefused: ") for rank in said)
    assert "python -m mpi_ckpt push" in said[1]["error"]
    reading = {**about, "save": [], "restore": True, "options": {"read_only": True}}
    outcome(launch.start(2, *PROGRAM, json.dumps({**about, "remote": None}), env=serialized))
    assert outcome(launch.start(2, *PROGRAM, json.dumps(reading), env=serialized))[0]["restored"] == 10


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["503", "reset", "truncate", "lost"])
def test_a_bad_network_only_delays_an_upload(launch, s3, tmp_path, fault):
    chance = random.Random(2)
    s3.proxy.decide = lambda r: fault if r.method != "DELETE" and chance.random() < 0.25 else None
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10, 20], "elements": 2_000_000}
    said = outcome(launch.start(2, *PROGRAM, json.dumps(about), env=s3.env))
    assert [rank["error"] for rank in said] == [None, None]
    assert steps(said, "upload") == [10, 20]
    assert is_whole(s3, 10, 20)
    assert any(request.fault for request in s3.proxy.requests)


def test_a_lost_answer_to_the_manifest_is_no_failure(launch, s3, tmp_path):
    lost = []

    def decide(request):
        if request.puts("upload_manifest") and len(lost) < 2:
            lost.append(request)
            return "lost"
        return None

    s3.proxy.decide = decide
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10]}
    said = outcome(launch.start(2, *PROGRAM, json.dumps(about), env=s3.env))
    assert lost
    assert steps(said, "upload") == [10]
    assert is_whole(s3, 10)


def test_answers_that_are_cut_short_are_read_again(launch, s3, tmp_path):
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "elements": 2_000_000}
    outcome(launch.start(2, *PROGRAM, json.dumps({**about, "save": [10]}), env=s3.env))
    chance = random.Random(3)
    s3.proxy.decide = lambda r: "cut" if r.method == "GET" and chance.random() < 0.2 else None
    again = {**about, "root": str(tmp_path / "empty"), "restore": True}
    assert outcome(launch.start(2, *PROGRAM, json.dumps(again), env=s3.env))[0]["restored"] == 10
    assert any(request.fault for request in s3.proxy.requests)


def test_a_killed_upload_goes_on_in_the_next_launch_without_sending_a_shard_again(launch, s3, tmp_path):
    s3.proxy.decide = lambda r: 600.0 if r.method in ("PUT", "POST") and "rank00001" in r.path else None
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "elements": 2_000_000}
    running = launch.start(2, *PROGRAM, json.dumps({**about, "save": [10]}), env=s3.env)
    until(running, lambda: 10 in list_remote(s3.store))
    running.end()
    assert committed_remotely(s3.store) == []
    before, s3.proxy.decide = s3.proxy.sent("rank00000"), lambda request: None
    said = outcome(launch.start(2, *PROGRAM, json.dumps({**about, "restore": True}), env=s3.env))
    assert said[0]["restored"] == 10
    (uploaded,) = events(said, "upload")
    size = manifest_of(tmp_path / "run", 10)["shards"][1]["nbytes"]
    assert uploaded["sent_nbytes"] == size
    assert s3.proxy.sent("rank00000") == before > size * 0.9
    assert size <= s3.proxy.sent("rank00001") < size * 1.01
    assert is_whole(s3, 10)


def test_an_upload_that_was_cut_short_sends_only_what_is_missing(job, remote, tmp_path):
    job(2, save=[10])
    save_id = read_upload_manifest(remote.store, 10).save_id
    remote.store.delete(["step_00000010/upload_manifest.json", f"step_00000010/{save_id}/rank00001.h5"])
    said = job(3)  # as many ranks as it likes
    assert events(said, "upload")[0]["sent_nbytes"] == manifest_of(tmp_path / "run", 10)["shards"][1]["nbytes"]
    assert is_whole(remote, 10)


def test_a_store_that_is_away_fails_nothing_and_gets_its_steps_later(launch, s3, tmp_path):
    s3.proxy.decide = lambda request: "503" if request.method in ("PUT", "POST") else None
    about = {"root": str(tmp_path / "run"), "remote": s3.url}
    options = {"upload_timeout": 1.0}
    said = outcome(launch.start(2, *PROGRAM, json.dumps({**about, "save": [10, 20], "options": options}), env=s3.env))
    assert [rank["error"] for rank in said] == [None, None]
    assert steps(said, "commit") == [10, 20]
    assert steps(said, "upload_failed")
    assert committed_remotely(s3.store) == []
    s3.proxy.decide = lambda request: None
    said = outcome(launch.start(2, *PROGRAM, json.dumps(about), env=s3.env))
    assert steps(said, "upload") == [10, 20]
    assert is_whole(s3, 10, 20)


# -- retention -------------------------------------------------------------------------------------------------------


def test_both_tiers_keep_their_own_number_and_no_local_copy_goes_before_the_remote_one_is_there(job, remote, tmp_path):
    said = job(2, save=[10, 20, 30, 40, 50], pause=0.3, options={"keep": 2, "remote_keep": 3})
    safe = {*steps(said, "upload_given_up")}
    for event in said[0]["events"]:  # rank 0 deletes
        if event["event"] == "upload":
            safe.add(event["step"])
        if event["event"] == "prune":
            assert event["step"] in safe
    uploaded = steps(said, "upload")
    assert is_whole(remote, *uploaded[-3:])
    assert [step for step in list_remote(remote.store)] == uploaded[-3:], "nothing is left of retired steps"
    assert set(local_steps(tmp_path / "run")) >= {40, 50}


def test_at_most_keep_steps_wait_and_then_the_oldest_is_given_up(job, remote, tmp_path):
    said = job(1, save=[10, 20, 30, 40, 50], options={"keep": 2, "remote_bandwidth": 4e5, "async_io": False})
    given_up, uploaded = steps(said, "upload_given_up"), steps(said, "upload")
    assert sorted(given_up + uploaded) == [10, 20, 30, 40, 50]
    assert given_up
    assert uploaded[-2:] == [40, 50]
    assert is_whole(remote, *uploaded)


def test_a_rollback_takes_the_remote_steps_back_too(job, remote, tmp_path):
    job(2, save=[10, 20, 30], options={"keep": 3})
    job(2, discard_after=10)
    assert is_whole(remote, 10)
    assert [*list_remote(remote.store)] == [10]


# -- errors ----------------------------------------------------------------------------------------------------------


def test_no_credential_is_in_a_log_or_an_object(launch, s3, tmp_path):
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10]}
    running = launch.start(2, *PROGRAM, json.dumps(about), env=s3.env)
    outcome(running)
    wrong = {**s3.env, "AWS_SECRET_ACCESS_KEY": "another-secret-of-mine"}
    failing = launch.start(2, *PROGRAM, json.dumps(about), env=wrong)
    failing.wait(60)
    text = running.output() + failing.output() + s3.store.get("step_00000010/upload_manifest.json")[0].decode()
    text += "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.json"))
    for secret in (s3.env["AWS_SECRET_ACCESS_KEY"], s3.env["AWS_ACCESS_KEY_ID"], wrong["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in text


@pytest.mark.parametrize(
    ("change", "url", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}, None, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "NOBODY-HERE"}, None, "InvalidAccessKeyId"),
        ({}, "s3://no-such-bucket/x", "NoSuchBucket"),
        ({}, "http://bucket/x", "s3://bucket/prefix or file:///directory"),
        ({"PYTHONPATH": "{hidden}"}, None, "pip install 'mpi_ckpt[s3]'"),
    ],
)
def test_what_only_the_user_can_change_is_said_at_once_on_every_rank(launch, s3, tmp_path, change, url, words):
    hidden = tmp_path / "hidden" / "obstore"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('as if it were not installed')")
    change = {name: value.replace("{hidden}", f"{tmp_path}/hidden:{ROOT}") for name, value in change.items()}
    about = {"root": str(tmp_path / "run"), "remote": url or s3.url, "save": [10]}
    running = launch.start(3, *PROGRAM, json.dumps(about), env={**s3.env, **change})
    errors = [rank["error"] for rank in outcome(running, 30)]
    assert errors == [errors[0]] * 3
    assert errors[0].startswith("RemoteRefused: ")
    assert words in errors[0]


def test_a_remote_tier_that_does_not_answer_is_no_fresh_start(launch, s3, tmp_path):
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "options": {"upload_timeout": 0.5}}
    outcome(launch.start(2, *PROGRAM, json.dumps({**about, "save": [10]}), env=s3.env))
    away = {**s3.env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    here = outcome(launch.start(2, *PROGRAM, json.dumps({**about, "restore": True}), env=away))
    assert here[0]["restored"] == 10, "what is here is enough"
    empty = {**about, "root": str(tmp_path / "empty"), "restore": True}
    errors = [rank["error"] for rank in outcome(launch.start(2, *PROGRAM, json.dumps(empty), env=away))]
    assert errors == [errors[0]] * 2
    assert errors[0].startswith("RemoteFailed: ")


# -- the training program --------------------------------------------------------------------------------------------


def test_a_run_whose_directory_was_lost_goes_on_from_the_remote_tier(launch, remote, tmp_path):
    def train(run: str, *more: object) -> list[float]:
        flags = ["--run-dir", tmp_path / run, "--ckpt-every", "4steps", "--steps", 12, *more]
        launch.train(2, *map(str, flags), env=remote.env).check()
        lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    whole = train("whole")
    far = ["--remote", remote.url, "--remote-keep", 2]
    first = train("lost", "--stop-at", 8, "--lr", "0.001", *far)
    assert committed_remotely(remote.store) == [4, 8]
    shutil.rmtree(tmp_path / "lost")
    second = train("lost", *far)
    assert len(first) == 8
    assert len(second) == 4
    assert first != whole[:8], "with settings of its own"
    again = train("again", "--lr", "0.001")
    assert first + second == again
