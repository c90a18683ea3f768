"""The verbs that know a remote tier: push, pull, ls --remote, verify --remote."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt.errors import MissingShard
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest, write_manifest
from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest, write_upload_manifest
from tests.checkpoints import flip, shard_file, step_dir
from tests.ranks import contents
from tests.tool_cases import copy_of_run, flip_in_array, verb
from tests.training import rows

OLD_RUN = Path(__file__).parent / "golden" / "old_run"  # of the trainer, with step 4 of two ranks, seed 0


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


# -- two runs of the trainer ------------------------------------------------------------------------------------------


@pytest.fixture
def e(tmp_path):
    return shutil.copytree(OLD_RUN, tmp_path / "e")


@pytest.fixture
def f(tmp_path):
    """A run with the same steps as `e`, and another seed."""
    directory = shutil.copytree(OLD_RUN, tmp_path / "f")
    document = json.loads((directory / "run.json").read_text())
    document["settings"]["seed"] = 1
    (directory / "run.json").write_text(json.dumps(document))
    step = step_dir(directory / "checkpoints", 4)
    manifest = read_manifest(step)
    meta = manifest.meta | {"settings": manifest.meta["settings"] | {"seed": 1}}
    write_manifest(step, replace(manifest, meta=meta, save_id="0123456789abcdef"))
    return directory


def with_id(run_dir: Path, run_id: str) -> None:
    """Give the run an id, as one that begins now has."""
    document = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({"run_id": run_id, **document}))
    step = step_dir(run_dir / "checkpoints", 4)
    manifest = read_manifest(step)
    write_manifest(step, replace(manifest, meta=manifest.meta | {"run_id": run_id}, save_id=run_id))


def objects(remote) -> dict[str, bytes]:
    return {key: remote.store.get(key)[0] for key in remote.store.list()}


def set_run_file(remote, data: bytes | None) -> None:
    remote.store.delete(["run.json"])
    if data is not None:
        remote.store.put("run.json", data)


@pytest.mark.parametrize("own", ["run.json", "steps alone"])
@pytest.mark.parametrize("there", ["run.json", "steps alone", "empty run.json", "newest manifest cut"])
def test_a_step_is_not_pushed_among_those_of_another_run(e, f, remote, own, there):
    assert verb("push", e, "--remote", remote.url).status == 0
    if there != "run.json":
        set_run_file(remote, b"" if there == "empty run.json" else None)
    if there == "newest manifest cut":
        remote.store.put("step_00000009/upload_manifest.json", b"{")
    if own != "run.json":
        (f / "run.json").unlink()
    before = objects(remote)
    said = verb("push", f, "--remote", remote.url)
    assert said.status == 2, said
    if (own, there) == ("run.json", "run.json"):
        assert f"the remote tier is another run's (file {remote.url}/run.json)" in said.err
    else:
        place = "run.json" if there == "run.json" else "step_00000004"
        assert f"step 4 is another run's (file {step_dir(f / 'checkpoints', 4)})" in said.err
        assert f"found seed 1; expected seed 0, as {remote.url}/{place} says" in said.err
    assert objects(remote) == before
    assert verb("push", e, "--remote", remote.url).status == 0


@pytest.mark.parametrize("own", ["run.json", "steps alone", "run.json alone"])
@pytest.mark.parametrize("there", ["run.json", "steps alone", "cut run.json"])
def test_a_step_of_another_run_is_not_pulled(e, f, remote, own, there, caplog):
    assert verb("push", e, "--remote", remote.url).status == 0
    if there != "run.json":
        set_run_file(remote, None if there == "steps alone" else b'{"settings": {"se')
    if own == "steps alone":
        (f / "run.json").unlink()
    elif own == "run.json alone":
        shutil.rmtree(f / "checkpoints")
    before = contents(f)
    said = verb("pull", f, "--remote", remote.url)
    assert said.status == 2, said
    if there == "run.json" and own != "steps alone":
        assert "the remote tier is another run's" in said.err
    else:
        place = step_dir(f / "checkpoints", 4) if own == "steps alone" else f / "run.json"
        assert f"step 4 is another run's (file {remote.url}/step_00000004)" in said.err
        assert f"found seed 0; expected seed 1, as {place} says" in said.err
    assert contents(f) == before
    assert caplog.messages == [f"cannot be read, counts for nothing: {remote.url}/run.json"] * (there == "cut run.json")


def test_a_step_is_not_pulled_along_with_another_run_s_file(e, f, remote, tmp_path):
    verb("push", e, "--remote", remote.url)
    set_run_file(remote, (f / "run.json").read_bytes())
    said = verb("pull", tmp_path / "new", "--remote", remote.url)
    assert said.status == 2
    assert f"found seed 0; expected seed 1, as {remote.url}/run.json says" in said.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("there", ["run.json", "steps alone"])
def test_runs_of_the_same_settings_are_told_apart_by_their_ids(e, remote, tmp_path, there):
    other = shutil.copytree(e, tmp_path / "other")
    with_id(e, "a" * 16)
    with_id(other, "b" * 16)
    verb("push", e, "--remote", remote.url)
    if there == "steps alone":
        set_run_file(remote, None)
    before = objects(remote), contents(other)
    for name in ("push", "pull"):
        said = verb(name, other, "--remote", remote.url)
        assert said.status == 2, said
        assert "is another run's" in said.err
        assert there == "run.json" or f"run_id {'b' * 16}" in said.err
    assert (objects(remote), contents(other)) == before


@pytest.mark.parametrize("held", [None, b""])
def test_the_run_s_file_is_in_the_remote_tier_before_a_shard_is(e, remote, held):
    run_file = (e / "run.json").read_bytes()
    set_run_file(remote, held)
    flip(shard_file(e / "checkpoints", 4, 0), 100)
    assert verb("push", e, "--remote", remote.url).status == 1
    assert objects(remote) == {"run.json": run_file}
    (e / "run.json").write_bytes(run_file.replace(b'"steps": 12', b'"steps": 13'))
    verb("push", e, "--remote", remote.url)
    assert objects(remote) == {"run.json": run_file}, "what is there stays"


def test_the_trainer_goes_on_from_a_run_that_was_only_pushed(e, launch, tmp_path):
    far = f"file://{tmp_path}/far"
    assert verb("push", e / "checkpoints", "--remote", far).status == 0
    shutil.rmtree(e)
    assert "and run.json fetched" in verb("pull", tmp_path / "new", "--remote", far).out
    launch.train(2, "--run-dir", f"{tmp_path}/new").check()
    known = [json.loads(line) for line in (OLD_RUN / "metrics_to_step_12.jsonl").read_text().splitlines()]
    expected = {row["step"]: row["loss"] for row in known if "loss" in row and row["step"] > 4}
    found = {step: row["loss"] for step, row in rows(tmp_path / "new").items()}
    assert list(found) == list(range(5, 13))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_where_the_run_s_file_is_alone_the_steps_go_below_it(e, remote, tmp_path):
    verb("push", e, "--remote", remote.url)
    set_run_file(remote, None)
    (tmp_path / "new").mkdir()
    shutil.copy(e / "run.json", tmp_path / "new")
    assert verb("pull", tmp_path / "new", "--remote", remote.url).status == 0
    assert names.list_steps(tmp_path / "new" / "checkpoints") == [4]


@pytest.mark.parametrize("name", ["push", "pull"])
@pytest.mark.parametrize(
    ("data", "found"), [(b"", "no bytes"), (b'{"settings": {', "14 bytes that say neither settings nor data")]
)
def test_a_run_whose_own_file_cannot_be_read_is_told_where_a_copy_is(e, remote, name, data, found):
    run_file = (e / "run.json").read_bytes()
    verb("push", e, "--remote", remote.url)
    (e / "run.json").write_bytes(data)
    for copy in (run_file, None):
        set_run_file(remote, copy)
        before = objects(remote), contents(e)
        said = verb(name, e, "--remote", remote.url)
        assert said.status == 2, said
        assert f"the settings of the run cannot be read (file {e / 'run.json'}); found {found}" in said.err
        place = f"{remote.url}/run.json" if copy else "that of the remote tier, or of a node,"
        assert f"Copy {place} into its place." in said.err
        assert (objects(remote), contents(e)) == before


def test_settings_and_files_of_other_programs_are_compared_with_nothing(run, remote, tmp_path):
    step = step_dir(run / "checkpoints", 30)
    (run / "run.json").write_text('["of its own"]')
    for lr in (1, 2):
        manifest = read_manifest(step)
        write_manifest(step, replace(manifest, meta={"settings": {"lr": lr}}))
        assert verb("push", run, "--remote", remote.url, "--step", 30).status == 0
        assert verb("push", run, "--remote", remote.url, "--step", 20).status == 0
        remote.store.delete(["step_00000020/upload_manifest.json"])
    assert remote.store.get("run.json") is None
    assert verb("pull", run, "--remote", remote.url).status == 0
    assert (run / "run.json").read_text() == '["of its own"]'


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
