"""The verbs that know a remote tier: push, pull, ls --remote, verify --remote."""

from __future__ import annotations

import time

import pytest

from mpi_ckpt.errors import MissingShard
from mpi_ckpt.storage import names
from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest, write_upload_manifest
from tests.checkpoints import flip, shard_file, step_dir
from tests.ranks import contents
from tests.tool_cases import copy_of_run, flip_in_array, verb


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


def test_a_step_that_was_pushed_and_pulled_is_the_same_to_the_byte(run, remote, tmp_path):
    assert verb("push", run, "--remote", remote.url, "--step", 10).status == 0
    said = verb("push", run, "--remote", remote.url, "--json")
    assert (said.status, said.json["step"]) == (0, 30)
    assert said.json["sent_nbytes"] > 0
    assert verb("push", run, "--remote", remote.url, "--json").json["sent_nbytes"] == 0, "all of it is there"
    assert committed_remotely(remote.store) == [10, 30]
    for step in (10, 30):
        options = () if step == 30 else ("--step", 10)
        assert verb("pull", tmp_path / "new", "--remote", remote.url, *options).status == 0
        here, there = (contents(step_dir(root, step)) for root in (run / "checkpoints", tmp_path / "new"))
        assert {name: data for name, data in here.items() if name != "pinned"} == there
    assert verb("verify", tmp_path / "new").status == 0
    assert verb("pull", tmp_path / "new", "--remote", remote.url, "--json").json["fetched_nbytes"] == 0


def test_ls_and_verify_look_into_the_remote_tier(run, remote):
    for step in (10, 20):
        verb("push", run, "--remote", remote.url, "--step", step)
    listed = verb("ls", "--remote", remote.url, "--json").json
    assert [(e["step"], e["state"], e["ranks"]) for e in listed] == [(10, "committed", 4), (20, "committed", 4)]
    verified = verb("verify", "--remote", remote.url, "--json")
    assert verified.status == 0
    assert [(v["step"], v["intact"]) for v in verified.json] == [(10, True), (20, True)]
    assert "intact" in verb("verify", "--remote", remote.url, "--step", 20, "--quick").out
    remote.store.delete(["step_00000020/upload_manifest.json"])
    assert [e["state"] for e in verb("ls", "--remote", remote.url, "--json").json] == ["committed", "uncommitted"]


def damage(remote, step: int, rank: int) -> str:
    """Flip a bit of a shard in the store; its key."""
    key = f"step_{step:08d}/{read_upload_manifest(remote.store, step).save_id}/rank{rank:05d}.h5"
    data = bytearray(remote.store.get(key)[0])
    data[5000] ^= 1
    remote.store.delete([key])
    remote.store.put(key, bytes(data))
    return key


def test_damage_in_the_remote_tier_is_found_and_not_pulled(run, remote, tmp_path):
    verb("push", run, "--remote", remote.url, "--step", 10)
    key = damage(remote, 10, 2)
    said = verb("verify", "--remote", remote.url, "--json")
    assert said.status == 1
    (fault,) = said.json[0]["faults"]
    assert (fault["kind"], fault["rank"], fault["path"]) == ("CorruptShard", 2, f"{remote.url}/{key}")
    pulled = verb("pull", tmp_path / "new", "--remote", remote.url)
    assert pulled.status == 1
    assert "rank 2" in pulled.err
    assert not [*(tmp_path / "new").rglob("*.h5*")], "nothing is left"
    assert verb("ls", tmp_path / "new").status in (0, 3)


def test_a_damaged_step_is_not_pushed(run, remote):
    flip_in_array(run / "checkpoints", 30, 1, "master")
    said = verb("push", run, "--remote", remote.url)
    assert said.status == 1
    assert str(shard_file(run / "checkpoints", 30, 1)) in said.err
    assert committed_remotely(remote.store) == []


def test_pull_mends_a_step_that_was_set_aside(run, remote):
    root = run / "checkpoints"
    verb("push", run, "--remote", remote.url)
    flip(shard_file(root, 30, 0), 100)
    (step_dir(root, 30) / "manifest.json").rename(step_dir(root, 30) / "manifest.damaged.json")
    assert verb("pull", run, "--remote", remote.url).status == 0
    assert verb("verify", run).status == 0
    assert not (step_dir(root, 30) / "manifest.damaged.json").exists()


@pytest.mark.parametrize("remote_rank", [3, 0])
def test_a_pull_that_fails_leaves_what_a_restore_had_set_aside(run, remote, remote_rank):
    step = step_dir(run / "checkpoints", 30)
    verb("push", run, "--remote", remote.url)
    flip(shard_file(run / "checkpoints", 30, 1), 100)
    (step / "manifest.json").rename(step / "manifest.damaged.json")
    damage(remote, 30, remote_rank)
    before = contents(step)
    said = verb("pull", run, "--remote", remote.url)
    assert said.status == 1
    assert f"rank {remote_rank}" in said.err
    assert contents(step) == before


def test_a_verb_that_fails_to_write_leaves_what_a_restore_had_set_aside(run, tmp_path):
    out = copy_of_run(tmp_path / "other") / "checkpoints"
    (step_dir(out, 30) / "manifest.json").rename(step_dir(out, 30) / "manifest.damaged.json")
    before = contents(step_dir(out, 30))
    flip_in_array(run / "checkpoints", 30, 3, "master")
    assert verb("reshard", run, "--step", 30, "--ranks", 2, "--out", out).status == 1
    assert contents(step_dir(out, 30)) == before


def test_what_the_store_has_damaged_is_sent_again_when_asked(run, remote, tmp_path):
    verb("push", run, "--remote", remote.url)
    damage(remote, 30, 2)
    said = verb("verify", "--remote", remote.url)
    assert said.status == 1
    assert "--step 30 --again" in said.out
    again = verb("push", run, "--remote", remote.url, "--again", "--json")
    shards = read_upload_manifest(remote.store, 30).shards
    assert (again.status, again.json["sent_nbytes"]) == (0, sum(shard.nbytes for shard in shards))
    assert verb("verify", "--remote", remote.url).status == 0
    assert verb("pull", tmp_path / "new", "--remote", remote.url).status == 0


@pytest.mark.parametrize("data", [None, b"short"])
def test_no_upload_manifest_speaks_of_a_shard_that_is_not_there(run, remote, data):
    verb("push", run, "--remote", remote.url)
    manifest = read_upload_manifest(remote.store, 30)
    key = f"step_00000030/{manifest.save_id}/rank00001.h5"
    remote.store.delete([key, "step_00000030/upload_manifest.json"])
    if data is not None:
        remote.store.put(key, data)
    with pytest.raises(MissingShard, match="not in the store") as error:
        write_upload_manifest(remote.store, manifest)
    assert error.value.rank == 1
    assert committed_remotely(remote.store) == []


def test_no_more_bytes_a_second_are_pushed_than_allowed(run, remote):
    began = time.monotonic()
    said = verb("push", run, "--remote", remote.url, "--bandwidth", "100kB", "--json")
    assert said.status == 0
    assert said.json["sent_nbytes"] > 20_000
    assert time.monotonic() - began >= said.json["sent_nbytes"] / 100_000


def test_a_run_of_the_trainer_is_pulled_as_one(run, remote, tmp_path):
    new = tmp_path / "new"
    verb("push", run, "--remote", remote.url)
    run_file = b'{"settings": {"seed": 1}, "data": {}, "steps": 30}'
    remote.store.put("run.json", run_file)
    assert "and run.json fetched" in verb("pull", new, "--remote", remote.url).out
    assert (new / "run.json").read_bytes() == run_file
    assert names.list_steps(new / "checkpoints") == [30]
    assert names.list_steps(new) == []
    (new / "run.json").write_bytes(run_file.replace(b"30", b"31"))
    assert "nothing fetched" in verb("pull", new, "--remote", remote.url).out
    assert (new / "run.json").read_bytes() != run_file
    assert verb("pull", tmp_path / "bare" / "checkpoints", "--remote", remote.url).status == 0
    assert names.list_steps(tmp_path / "bare" / "checkpoints") == [30], "the checkpoints' own directory was named"
    assert not (tmp_path / "bare" / "run.json").exists()


def test_the_trainer_goes_on_from_a_run_that_was_pulled(launch, tmp_path):
    far, flags = f"file://{tmp_path}/far", ("--ckpt-every", "4steps", "--steps", "12")
    launch.train(2, "--run-dir", f"{tmp_path}/lost", *flags, "--stop-at", "8", "--remote", far).check()
    assert verb("pull", tmp_path / "new", "--remote", far).status == 0
    said = launch.train(2, "--run-dir", f"{tmp_path}/new", *flags).check()
    assert "step 8" in said.stdout + said.stderr
    assert names.list_steps(tmp_path / "new" / "checkpoints")[-1] == 12


@pytest.mark.parametrize(
    ("change", "url", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "s3://bucket/a", "no credentials"),
        ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "s3://bucket/b", "no AWS_ACCESS_KEY_ID and no"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "s3://bucket/c", "found no AWS_SECRET_ACCESS_KEY in the environment"),
        ({"AWS_ACCESS_KEY_ID": "NOBODY"}, "s3://bucket/d", "the object store does not know the key"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://bucket/e", "the object store refuses the secret key"),
        ({}, "s3://no-such-bucket/f", "the bucket does not exist"),
        ({}, "s3://no-such-bucket/g", "Make it"),
    ],
)
def test_why_s3_refuses_is_said_in_words(s3, monkeypatch, change, url, words):
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # no machine of a cloud's, wherever the test runs
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    said = verb("ls", "--remote", url)
    assert said.status == 1
    assert words in said.err
    assert "169.254" not in said.err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["ls"], 2, "found none; expected RUN_DIR, --local or --remote"),
        (["verify", "--local", "{run}", "--remote", "{url}"], 2, "found --local and --remote"),
        (["ls", "{run}", "--remote", "{url}"], 2, "not allowed with"),
        (["ls", "--remote", "{url}"], 3, "no step in the remote tier"),
        (["verify", "--remote", "{url}"], 3, "no step in the remote tier"),
        (["pull", "{run}", "--remote", "{url}"], 3, "no step in the remote tier"),
        (["pull", "{run}", "--remote", "{url}", "--step", "10"], 3, "step 10 is not in the remote tier"),
        (["push", "{run}", "--remote", "{url}", "--step", "11"], 3, "step 11 is not committed"),
        (["push", "{run}", "--remote", "gopher://x"], 2, "s3://bucket/prefix or file:///directory"),
        (["ls", "--remote", "/tmp/x"], 2, "s3://bucket/prefix or file:///directory"),
        (["pull", "{run}", "--remote", "gs://bucket/x"], 2, "s3://bucket/prefix or file:///directory"),
        (["push", "{run}"], 2, "--remote"),
    ],
)
def test_what_is_not_there_or_not_right_is_a_plain_line(run, remote, arguments, status, words):
    said = verb(*(word.format(run=run, url=remote.url) for word in arguments))
    assert said.status == status
    assert words in said.err
    assert "Traceback" not in said.err


def test_another_save_of_the_step_is_not_replaced(run, remote, tmp_path):
    verb("push", run, "--remote", remote.url)
    other = copy_of_run(tmp_path / "other")
    assert verb("reshard", other, "--ranks", 2, "--out", tmp_path / "two").status == 0
    said = verb("pull", tmp_path / "two", "--remote", remote.url)
    assert said.status == 1
    assert "another save of the step" in said.err
