"""The verbs that know a remote tier: push, pull, ls --remote, verify --remote."""

from __future__ import annotations

import pytest

from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest
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


def test_damage_in_the_remote_tier_is_found_and_not_pulled(run, remote, tmp_path):
    verb("push", run, "--remote", remote.url, "--step", 10)
    manifest = read_upload_manifest(remote.store, 10)
    key = f"step_00000010/{manifest.save_id}/rank00002.h5"
    data = bytearray(remote.store.get(key)[0])
    data[5000] ^= 1
    remote.store.delete([key])
    remote.store.put(key, bytes(data))
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


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["ls"], 2, "RUN_DIR --remote is required"),
        (["ls", "{run}", "--remote", "{url}"], 2, "not allowed with"),
        (["ls", "--remote", "{url}"], 3, "no step in the remote tier"),
        (["verify", "--remote", "{url}"], 3, "no step in the remote tier"),
        (["pull", "{run}", "--remote", "{url}"], 3, "no step in the remote tier"),
        (["pull", "{run}", "--remote", "{url}", "--step", "10"], 3, "step 10 is not in the remote tier"),
        (["push", "{run}", "--remote", "{url}", "--step", "11"], 3, "step 11 is not committed"),
        (["push", "{run}", "--remote", "gopher://x"], 1, "s3://bucket/prefix or file:///directory"),
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
