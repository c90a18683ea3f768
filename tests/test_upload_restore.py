"""Two tiers at a restore: the newest step of both, each shard from the nearest place where it is intact."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_ckpt import (
    Checkpointer,
    CorruptShard,
    InvalidManifest,
    MissingShard,
    NoCheckpoint,
    PerRank,
    RemoteRefused,
    Shard,
    shard_range,
)
from mpi_ckpt.checkpoint.upload_queue import UploadQueue
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.remote_steps import committed_remotely, list_remote, read_upload_manifest
from tests.checkpoints import flip, manifest_of, on_one, raised, shard_file, step_dir

N = 400_003  # elements; more than a chunk of 1 MiB on each of two ranks


def state(comm, step: int | None) -> dict[str, Any]:
    start, stop = shard_range(N, comm.size, comm.rank)
    array = np.full(stop - start, np.nan) if step is None else np.arange(start, stop) * (step + 0.5)
    return {
        "x": Shard(array, start=start, shape=N),
        "step": step,
        "own": PerRank(comm.rank, resize=lambda old, rank, size: rank),
    }


def holds(comm, found: dict[str, Any], step: int) -> bool:
    return np.array_equal(found["x"].array, state(comm, step)["x"].array) and found["step"] == step


def save(comm, root: Path, *steps: int, **options: Any) -> str:
    """Save steps, and wait until they are uploaded; the URL."""
    url = f"file://{root.parent}/remote"
    with Checkpointer(root, comm, remote=url, keep=None, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(comm, step), overwrite=True)
    assert set(committed_remotely(open_store(url))) >= {*steps}
    return url


def restore(comm, root: Path, url: str | None, **options: Any) -> tuple[dict[str, Any], int | None]:
    target = state(comm, None)
    with Checkpointer(root, comm, remote=url, read_only=True) as checkpointer:
        found = checkpointer.restore(target, **options)
    return target, found and found.step


def object_of(url: str, step: int, rank: int) -> Path:
    """The file of a shard in a directory as remote tier."""
    save_id = read_upload_manifest(open_store(url), step).save_id
    return Path(url.removeprefix("file://")) / f"step_{step:08d}/{save_id}/rank{rank:05d}.h5"


@pytest.mark.mpi(ranks=[1, 3], timeout=60, unit="s")
@pytest.mark.parametrize("verify", ["full", "quick", "none"])
def test_an_empty_directory_restores_from_the_remote_tier(comm, shared_path, verify):
    url = save(comm, shared_path / "run", 10, 20)
    found, step = restore(comm, shared_path / "empty", url, verify=verify)
    assert step == 20
    assert holds(comm, found, 20)
    found, step = restore(comm, shared_path / "empty", url, step=10, verify=verify)
    assert step == 10
    assert holds(comm, found, 10)
    raised(comm, NoCheckpoint, lambda: restore(comm, shared_path / "empty", url, step=15))


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
@pytest.mark.parametrize("damage", ["flipped", "gone", "short", "manifest"])
def test_a_damaged_local_shard_is_read_from_the_remote_tier(comm, shared_path, damage, caplog):
    root = shared_path / "run"
    url = save(comm, root, 10)
    path = shard_file(root, 10, 1)

    def spoil() -> None:
        if damage == "flipped":
            flip(path, manifest_of(root, 10)["shards"][1]["blocks"]["x"][0]["offset"] + 5)
        elif damage == "gone":
            path.unlink()
        elif damage == "short":
            path.write_bytes(path.read_bytes()[:-4])
        else:
            flip(step_dir(root, 10) / "manifest.json", 200)

    on_one(comm, spoil)
    with caplog.at_level(logging.WARNING):
        found, step = restore(comm, root, url)
    assert step == 10
    assert holds(comm, found, 10)
    if comm.rank == (0 if damage == "manifest" else 1):
        assert "step 10" in caplog.text


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_damage_in_both_tiers_is_an_error_and_the_older_step_is_whole(comm, shared_path):
    root = shared_path / "run"
    url = save(comm, root, 10, 20)

    def spoil() -> None:
        for path in (shard_file(root, 20, 1), object_of(url, 20, 1)):
            flip(path, manifest_of(root, 20)["shards"][1]["blocks"]["x"][0]["offset"] + 5)

    on_one(comm, spoil)
    error = raised(comm, CorruptShard, lambda: restore(comm, root, url))
    assert error.path == str(shard_file(root, 20, 1)), "the nearest copy is the one to look at"
    assert error.rank == 1
    found, step = restore(comm, root, url, on_damage="older")
    assert step == 10
    assert holds(comm, found, 10)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
@pytest.mark.parametrize(
    ("damage", "kind"), [("flipped", CorruptShard), ("short", CorruptShard), ("gone", MissingShard)]
)
def test_a_damaged_object_is_an_error_that_names_it(comm, shared_path, damage, kind):
    url = save(comm, shared_path / "run", 10)
    path = object_of(url, 10, 1)

    def spoil() -> None:
        if damage == "flipped":
            flip(path, manifest_of(shared_path / "run", 10)["shards"][1]["blocks"]["x"][0]["offset"] + 5)
        elif damage == "short":
            path.write_bytes(path.read_bytes()[:-4])
        else:
            path.unlink()

    on_one(comm, spoil)
    error = raised(comm, kind, lambda: restore(comm, shared_path / "empty", url))
    assert error.path == f"file://{path}"
    assert error.rank == 1


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_damaged_remote_step_that_is_passed_over_is_named_by_an_event(comm, shared_path):
    url = save(comm, shared_path / "run", 10, 20, 30, 40)
    flipped, gone, manifest = object_of(url, 20, 1), object_of(url, 30, 0), object_of(url, 40, 0).parents[1]
    offset = manifest_of(shared_path / "run", 20)["shards"][1]["blocks"]["x"][0]["offset"]
    on_one(comm, lambda: flip(flipped, offset + 5))
    on_one(comm, gone.unlink)
    on_one(comm, lambda: flip(manifest / "upload_manifest.json", 200))
    events: list[dict[str, Any]] = []
    target = state(comm, None)
    with Checkpointer(shared_path / "empty", comm, remote=url, on_event=events.append) as checkpointer:
        assert checkpointer.restore(target, on_damage="older").step == 10
    assert holds(comm, target, 10)
    damage = [event for event in events if event["event"] == "damage"]
    assert [event["step"] for event in damage] == [40, 30, 20]
    for event, path in zip(damage, (manifest, gone, flipped), strict=True):
        assert f"file://{path}" in event["error"]


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_shard_that_is_damaged_here_is_not_uploaded_and_the_failure_names_it(comm, shared_path):
    root, url, events = shared_path / "run", f"file://{shared_path}/remote", []
    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(10, state(comm, 10))
    path = shard_file(root, 10, 1)
    on_one(comm, lambda: flip(path, manifest_of(root, 10)["shards"][1]["blocks"]["x"][0]["offset"] + 5))
    with Checkpointer(root, comm, remote=url, on_event=events.append):
        pass  # what an earlier launch has left behind is uploaded
    (failed,) = events
    assert (failed["event"], failed["step"]) == ("upload_failed", 10)
    assert str(path) in failed["error"]
    assert "sha256" in failed["error"]
    found = open_store(url).list()
    assert not [key for key in found if key.endswith(("rank00001.h5", "upload_manifest.json"))], found


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_what_was_sent_of_a_step_that_is_given_up_does_not_stay(comm, shared_path):
    root, url, events = shared_path / "run", f"file://{shared_path}/remote", []
    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(10, state(comm, 10))
    on_one(comm, lambda: flip(shard_file(root, 10, 1), 9000))
    with Checkpointer(root, comm, remote=url, keep=1, on_event=events.append) as checkpointer:
        while not [event for event in events if event["event"] == "upload_failed"]:
            time.sleep(0.01)
        assert [*list_remote(open_store(url))] == [10], "one rank's shard was well"
        checkpointer.save(20, state(comm, 20))
        checkpointer.wait_until_finished()  # step 10 is given up, and gone here
        checkpointer.save(30, state(comm, 30))
    assert {"event": "upload_given_up", "step": 10} in events
    assert min(list_remote(open_store(url))) > 10


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_the_newest_step_over_both_tiers_wins(comm, shared_path):
    root = shared_path / "run"
    url = save(comm, root, 10, 20)
    on_one(comm, lambda: shutil.rmtree(step_dir(root, 20)))
    assert restore(comm, root, url)[1] == 20
    with Checkpointer(root, comm, keep=None) as checkpointer:  # without the remote tier
        checkpointer.save(30, state(comm, 30))
    assert restore(comm, root, url)[1] == 30
    on_one(comm, lambda: shutil.rmtree(step_dir(root, 30)))
    assert restore(comm, root, url)[1] == 20


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_of_two_saves_of_a_step_the_local_one_counts_until_it_is_lost(comm, shared_path):
    root = shared_path / "run"
    url = save(comm, root, 10)
    with Checkpointer(root, comm) as checkpointer:
        other = state(comm, 10)
        other["x"].array[...] = 7.0
        checkpointer.save(10, other, overwrite=True)
    found, _ = restore(comm, root, url)
    assert (found["x"].array == 7.0).all()
    on_one(comm, lambda: shutil.rmtree(step_dir(root, 10)))
    assert holds(comm, restore(comm, root, url)[0], 10)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_tampered_upload_manifest_is_refused(comm, shared_path):
    url = save(comm, shared_path / "run", 10)
    path = Path(url.removeprefix("file://")) / "step_00000010" / "upload_manifest.json"
    on_one(comm, lambda: path.write_text(path.read_text().replace("/rank00001.h5", "/../rank00001.h5")))
    raised(comm, InvalidManifest, lambda: restore(comm, shared_path / "empty", url))


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_what_is_only_in_the_remote_tier_is_listed_and_nothing_there_is_none(comm, shared_path):
    url = save(comm, shared_path / "run", 10)
    with Checkpointer(shared_path / "empty", comm, remote=url) as checkpointer:
        assert checkpointer.all_steps() == [10]
        assert checkpointer.latest_step() == 10
    assert restore(comm, shared_path / "other", f"file://{shared_path}/nothing")[1] is None


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
@pytest.mark.parametrize(
    "name", ["s3:/bucket", "file://host/dir", "file:///a/../b", "ftp://x/y", "/plain", "s3://b/x?y"]
)
def test_a_url_that_is_none_is_refused_on_every_rank(comm, shared_path, name):
    error = raised(comm, RemoteRefused, lambda: Checkpointer(shared_path / "run", comm, remote=name))
    assert "s3://bucket/prefix or file:///directory" in str(error)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
@pytest.mark.parametrize(
    ("option", "value"), [("remote_keep", 0), ("remote_bandwidth", 0), ("remote_bandwidth", -1), ("upload_timeout", -1)]
)
def test_a_bad_option_is_named(comm, shared_path, option, value):
    with pytest.raises(ValueError, match=option):
        Checkpointer(shared_path / "run", comm, remote=f"file://{shared_path}/remote", **{option: value})


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
@pytest.mark.parametrize("read_only", [False, True])
def test_a_remote_directory_that_is_none_is_an_error_of_every_rank(comm, shared_path, read_only):
    on_one(comm, lambda: (shared_path / "file").write_text(""))

    def use() -> None:
        with Checkpointer(shared_path / "run", comm, remote=f"file://{shared_path}/file", read_only=read_only) as c:
            c.restore(state(comm, None))

    error = raised(comm, RemoteRefused, use)
    assert error.path == f"{shared_path}/file"


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_an_exception_in_the_with_block_does_not_wait_for_uploads(comm, shared_path):
    url = f"file://{shared_path}/remote"

    def fail() -> None:
        with Checkpointer(shared_path / "run", comm, remote=url, remote_bandwidth=1.0) as checkpointer:
            checkpointer.save(10, state(comm, 10))
            checkpointer.wait_until_finished()
            raise KeyError("mine")

    with pytest.raises(KeyError):  # in the time of a test: the upload would take hours
        fail()
    assert committed_remotely(open_store(url)) == []


# -- the queue -------------------------------------------------------------------------------------------------------


def test_the_queue_gives_up_the_oldest_beside_the_one_on_its_way():
    queue = UploadQueue(2)
    queue.add(10)
    assert queue.take() == 10
    for step in (20, 30, 40):
        queue.add(step)
    assert queue.steps == {10, 30, 40}
    assert queue.take_given_up() == [20]
    assert queue.take_given_up() == []
    queue.put_back()
    assert queue.take(frozenset({10})) == 30
    queue.done()
    assert queue.steps == {10, 40}


def test_a_step_saved_again_while_it_is_on_its_way_goes_once_more():
    queue = UploadQueue(None)
    queue.add(10, 20)
    assert queue.take() == 10
    queue.add(10)
    queue.done()
    assert (queue.take(), queue.take()) == (20, 10)


def test_what_an_earlier_launch_left_goes_before_the_others_and_what_is_on_its_way_only_once():
    queue = UploadQueue(3)
    queue.add(30, 40)
    assert queue.take() == 30
    queue.add_before(10, 20, 30, 40)
    assert queue.take_given_up() == []
    assert (queue.take(), queue.take(), queue.take(), queue.take()) == (10, 20, 40, None)
    queue.add(50)
    queue.add_before(10, 20, 30)
    assert queue.take_given_up() == [10]


def test_the_queue_forgets_what_is_discarded():
    queue = UploadQueue(3)
    queue.add(10, 20, 30)
    queue.forget_after(15)
    assert queue.steps == {10}
