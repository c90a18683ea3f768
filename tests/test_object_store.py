"""What a store of objects promises, whichever kind it is: whole or not at all, and nobody's bytes under another's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.storage.object_directory import DirectoryObjects
from mpi_ckpt.storage.places import RemoteFile
from mpi_ckpt.storage.remote_steps import list_remote, retire
from mpi_ckpt.storage.shard_stream import send_shard
from tests.programs.faults import DURABLE, Operation, watched
from tests.storage_cases import save_shard, to_write

MIB = 1 << 20


def pieces(*sizes: int) -> Iterator[np.ndarray]:
    """Bytes in which every shift shows; each piece is spoiled once the next is taken, as one that is read ahead."""
    start = 0
    for size in sizes:
        piece = (np.arange(start, start + size) % 251).astype(np.uint8)
        yield piece
        piece[:] = 255
        start += size


def joined(*sizes: int) -> bytes:
    return (np.arange(sum(sizes)) % 251).astype(np.uint8).tobytes()


def files(remote) -> list[str]:
    """What really lies in a directory, whatever the store says."""
    root = Path(remote.url.removeprefix("file://"))
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# -- put -------------------------------------------------------------------------------------------------------------


def test_an_object_is_made_once_and_replaced_only_as_it_was_seen(remote):
    store = remote.store
    assert store.get("a/b") is None
    assert store.put("a/b", b"one")
    data, version = store.get("a/b")
    assert data == b"one"
    assert not store.put("a/b", b"two"), "it is there already"
    assert not store.put("a/b", b"two", "of another version")
    assert store.get("a/b") == (b"one", version)
    assert store.put("a/b", b"two", version)
    data, second = store.get("a/b")
    assert data == b"two"
    assert second != version
    assert not store.put("a/b", b"three", version), "somebody has replaced what was seen"
    assert store.get("a/b") == (b"two", second)
    assert store.list() == {"a/b": 3}


def test_what_is_to_be_replaced_and_is_gone_is_not_put(remote):
    store = remote.store
    store.put("a", b"one")
    _, version = store.get("a")
    store.delete(["a"])
    assert not store.put("a", b"two", version)
    assert store.get("a") is None


@pytest.mark.parametrize("sizes", [(), (5,), (3 * MIB, 3 * MIB, 5 * MIB, 7)], ids=["nothing", "small", "parts"])
def test_a_stream_arrives_bit_for_bit_under_a_key_that_held_another(remote, sizes):
    store = remote.store
    store.put("d/x", b"before")
    store.put_stream("d/x", pieces(*sizes), sum(sizes))
    assert store.list() == {"d/x": sum(sizes)}
    assert store.get("d/x")[0] == joined(*sizes)


@pytest.mark.parametrize("before", [None, b"what was there"], ids=["new", "again"])
@pytest.mark.parametrize("sizes", [(), (5,), (6 * MIB, 6 * MIB)], ids=["at once", "soon", "with parts on their way"])
def test_a_stream_that_breaks_off_leaves_what_was_there(remote, before, sizes):
    store = remote.store
    if before is not None:
        store.put("d/x", before)

    def breaking() -> Iterator[np.ndarray]:
        yield from pieces(*sizes)
        raise CorruptShard("it is not what was saved", path="/a/shard")

    with pytest.raises(CorruptShard, match="it is not what was saved"):
        store.put_stream("d/x", breaking(), 20 * MIB)
    assert store.list() == ({} if before is None else {"d/x": len(before)})
    found = store.get("d/x")
    assert (found and found[0]) == before
    if not remote.is_s3:
        assert files(remote) == ([] if before is None else ["d/x"])


# -- read, list, delete ----------------------------------------------------------------------------------------------


def test_a_read_ends_where_the_object_does(remote):
    store = remote.store
    store.put("x", bytes(range(10)))
    assert store.read("x", 0, 10) == bytes(range(10))
    assert store.read("x", 3, 4) == bytes(range(3, 7))
    assert store.read("x", 8, 100) == bytes([8, 9])
    assert store.read("x", 4, 0) == b""
    assert store.read("y", 0, 10) is None
    assert (store.size("x"), store.size("y")) == (10, None)


def test_behind_the_end_of_an_object_there_is_nothing_to_read(remote):
    remote.store.put("x", b"12345")
    assert remote.store.read("x", 5, 10) == b""
    assert remote.store.read("x", 100, 10) == b""


def test_a_listing_is_of_a_directory_and_of_whole_objects(remote):
    store = remote.store
    for key in ("s_1/a", "s_1/b/c", "s_10/a", "s_1x"):
        store.put(key, key.encode())
    assert store.list("s_1") == {"s_1/a": 5, "s_1/b/c": 7}
    assert store.list("s_2") == {}
    assert sorted(store.list()) == ["s_1/a", "s_1/b/c", "s_10/a", "s_1x"]
    if not remote.is_s3:
        Path(remote.url.removeprefix("file://"), "s_1/half.tmp").write_bytes(b"half")
        assert store.list("s_1") == {"s_1/a": 5, "s_1/b/c": 7}


def test_a_store_that_nobody_has_put_anything_into_is_empty(remote):
    assert remote.store.list() == {}
    assert remote.store.get("x") is None
    remote.store.check()
    assert remote.store.list() == {}, "a look leaves nothing"


def test_what_is_gone_is_deleted_again_without_a_word(remote):
    store = remote.store
    for key in ("a/x", "a/y", "b/z"):
        store.put(key, b"1")
    store.delete(["a/x", "a/never", "never/at/all", "b/z"])
    assert store.list() == {"a/y": 1}
    store.delete(["a/x", "b/z"])
    store.delete([])
    assert store.list() == {"a/y": 1}


# -- shards ----------------------------------------------------------------------------------------------------------


def test_a_shard_that_arrived_is_not_sent_again_and_one_of_another_size_is(remote, tmp_path):
    store, told = remote.store, []
    path, record = save_shard(tmp_path, [to_write("a", np.arange(1000.0))])
    target = RemoteFile(store.url, "s/rank00000.h5")
    whole = path.read_bytes()

    def send(**options: bool) -> int:
        return send_shard(store, target, path, record, told.append, **options)

    for wrong in (whole[:-1], whole + b"x", b""):
        store.delete([target.key])
        store.put(target.key, wrong)
        assert send() == record.nbytes
        assert store.get(target.key)[0] == whole
    assert sum(told) == 3 * record.nbytes
    assert send() == 0
    assert sum(told) == 3 * record.nbytes
    assert send(again=True) == record.nbytes


def test_a_shard_that_is_not_what_was_saved_never_arrives(remote, tmp_path):
    path, record = save_shard(tmp_path, [to_write("a", np.arange(1000.0))])
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    target = RemoteFile(remote.store.url, "s/rank00000.h5")
    with pytest.raises(CorruptShard) as caught:
        send_shard(remote.store, target, path, record, lambda nbytes: None)
    assert caught.value.path == str(path)
    assert remote.store.list() == {}


# -- the directory's own door ----------------------------------------------------------------------------------------


@pytest.fixture
def watched_store(tmp_path):
    """A directory as a store, and the changes that were made to it in their order; those to durable names and bytes."""
    changes: list[str] = []

    @contextlib.contextmanager
    def around(operation: Operation) -> Iterator[None]:
        yield
        if operation.call in DURABLE:
            changes.append(str(operation))

    root = tmp_path / "far"
    root.mkdir()
    with watched(root, around):
        yield DirectoryObjects(root), changes


@pytest.mark.parametrize("how", ["put", "put_stream"])
def test_an_object_gets_its_name_after_its_bytes_and_both_are_durable(watched_store, how):
    store, changes = watched_store
    if how == "put":
        store.put("a/x", b"12345")
    else:
        store.put_stream("a/x", pieces(5), 5)
    assert changes[:2] == ["mkdir a", "fsync ."]
    assert changes[-3:] == ["fsync a/x.tmp", "rename a/x", "fsync a"]


def test_a_retired_step_durably_loses_its_manifest_before_any_shard(watched_store):
    store, changes = watched_store
    step, save_id = "step_00000010", "0123456789abcdef"
    for key in (f"{save_id}/rank00000.h5", f"{save_id}/rank00001.h5", "upload_manifest.json"):
        store.put(f"{step}/{key}", b"1")
    changes.clear()
    retire(store, 10, list_remote(store)[10])
    of_files = [change for change in changes if not change.startswith("rmdir")]
    assert of_files[:2] == [f"unlink {step}/upload_manifest.json", f"fsync {step}"]
    assert sorted(of_files[2:4]) == [f"unlink {step}/{save_id}/rank0000{rank}.h5" for rank in range(2)]
    assert of_files[4] == f"fsync {step}/{save_id}"
    assert store.list() == {}
