"""What a store of objects promises, whichever kind it is: whole or not at all, and nobody's bytes under another's."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from mpi_ckpt.errors import CorruptShard, RemoteFailed, RemoteRefused
from mpi_ckpt.storage.object_directory import DirectoryObjects
from mpi_ckpt.storage.object_s3 import S3Objects
from mpi_ckpt.storage.object_store import check_url, open_store, put_in_place
from mpi_ckpt.storage.places import RemoteFile
from mpi_ckpt.storage.remote_steps import list_remote, retire
from mpi_ckpt.storage.shard_stream import send_shard
from tests.programs.faults import DURABLE, Operation, watched
from tests.proxy import answer
from tests.s3_server import READER
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


class Between:
    """A store that somebody else puts something into at the last moment."""

    def __init__(self, store, other: bytes) -> None:
        self.url, self.get, self._store, self._other = store.url, store.get, store, other

    def put(self, key: str, data: bytes, replaces: str | None = None) -> bool:
        self._store.put(key, self._other, replaces)
        return self._store.put(key, data, replaces)


@pytest.mark.parametrize("before", [None, b"what was there"], ids=["new", "again"])
def test_of_two_that_put_a_small_object_at_one_moment_one_is_told(remote, before):
    store = remote.store
    if before is not None:
        store.put("x", before)
    with pytest.raises(RemoteFailed, match="an object is not what was put"):
        put_in_place(Between(store, b"the other's"), "x", b"mine", "mine")
    assert store.get("x")[0] == b"the other's"
    put_in_place(store, "x", b"mine", "mine")
    assert store.get("x")[0] == b"mine"


def test_of_two_that_put_the_same_stream_at_one_moment_one_is_told_and_no_half_is_seen(tmp_path):
    store = DirectoryObjects(tmp_path)
    begun, go_on = threading.Event(), threading.Event()

    def halting() -> Iterator[np.ndarray]:
        for piece in pieces(1000, 1000):
            yield piece
            begun.set()
            assert go_on.wait(60)

    def overtaken() -> Iterator[np.ndarray]:
        yield from pieces(1000, 1000)
        second.append(pool.submit(store.put_stream, "d/x", halting(), 2000))
        assert begun.wait(60)

    second = []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RemoteFailed, match="another one writes the same object"):
            store.put_stream("d/x", overtaken(), 2000)
        assert store.list() == {}
        go_on.set()
        second[0].result()
    assert store.get("d/x")[0] == joined(1000, 1000)


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


def test_what_is_listed_and_deleted_is_all_of_it_however_much_and_no_neighbours(remote):
    """More than a thousand, which is as many as one answer of S3 lists and one request deletes."""
    store, neighbour = remote.store, open_store(f"{remote.url}2")
    neighbour.put("a", b"1")
    keys = [f"step_00000010/0123456789abcdef/rank{rank:05d}.h5" for rank in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda key: store.put(key, b"1"), keys))
    assert sorted(store.list()) == keys
    assert len(list_remote(store, 10)[10].shards) == 1100
    store.delete(keys)
    assert store.list() == {}
    assert neighbour.list() == {"a": 1}


@pytest.mark.parametrize("fault", ["lost", "reset", "503"])
def test_a_fault_of_the_network_while_something_is_deleted_is_no_failure(s3, monkeypatch, fault):
    faults = [fault]
    s3.proxy.decide = lambda request: faults.pop() if "delete" in request.path and faults else None
    s3.store.put("x", b"1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.proxy.endpoint)
    S3Objects("bucket", s3.url.removeprefix("s3://bucket/")).delete(["x"])
    assert s3.store.list() == {}
    assert faults == []


# -- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a b", "100%", "50%25", "a+b", "~me", "it's [1]", "x&y=z;w", "für", "a%2Fb", "a:b"], ids=range(10)
)
def test_a_store_goes_by_its_own_url_whatever_characters_are_in_it(remote, name):
    url = f"{remote.url}/{name if remote.is_s3 else quote(name)}/run"
    store = open_store(url)
    for again in (store, open_store(store.url)):
        again.put("d/x", b"1")
        again.put_stream("d/y", pieces(5), 5)
        assert again.list() == again.list("d") == store.list() == {"d/x": 1, "d/y": 5}
    target = RemoteFile(store.url, "d/y")
    assert (target.size(), target.read(1, 2)) == (5, bytes([1, 2]))
    assert sorted(remote.store.list()) == [f"{name}/run/d/{key}" for key in "xy"]
    store.delete(["d/x", "d/y"])
    assert store.list() == remote.store.list() == {}


@pytest.mark.parametrize(
    "url",
    [
        *("", "/plain", "s3:/b", "s3:b/x", "s3://", "s3:///x", "s3://b:80/x", "s3://a b/x", "s3://b%20/x", "s3://[b/x"),
        *(
            "s3://b/x?y",
            "s3://b/x#y",
            "s3://me:secret@b/x",
            "s3://b/../x",
            "s3://b/x//y",
            "s3://b/x\\y",
            "s3://b/x ",
            " s3://b/x",
        ),
        *("s3://b/x\ty", "s3://b/x\0y", "file:x", "file:x/y", "file://x/y", "file:///", "file:////", "file:///x?y"),
        *("file:///x/../y", "file:///x/%2e%2e/y", "file:///x%00y", "file:///x\n", "ftp://x/y"),
        *(None, 5, Path("/x"), b"s3://b"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url):
    with pytest.raises(RemoteRefused, match="s3://bucket/prefix or file:///directory") as caught:
        check_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/", "S3://my.bucket_1/x/y/", "s3://b//x/", "file:///x//y/", "file://localhost/x"]
)
def test_a_url_that_names_a_store_is_not(url):
    assert check_url(url)[0] in ("s3", "file")


# -- refusals --------------------------------------------------------------------------------------------------------


def test_whether_there_is_something_to_read_is_asked_without_making_a_place(tmp_path):
    DirectoryObjects(tmp_path / "far").check()
    assert not (tmp_path / "far").exists()
    DirectoryObjects(tmp_path / "far").check(writing=True)
    assert [*(tmp_path / "far").iterdir()] == []


def test_a_key_that_may_only_read_is_refused_by_who_wants_to_write(s3, monkeypatch):
    s3.store.put("x", b"1")
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    reader = S3Objects("bucket", s3.url.removeprefix("s3://bucket/"))
    reader.check()
    assert reader.get("x")[0] == b"1"
    with pytest.raises(RemoteRefused, match="the key may not do this"):
        reader.check(writing=True)
    s3.store.check(writing=True)
    assert s3.store.list() == {"x": 1}, "a look leaves nothing"


def test_a_file_where_a_directory_has_to_be_is_refused(tmp_path):
    (tmp_path / "far").write_text("")
    for store in (DirectoryObjects(tmp_path / "far" / "run"), DirectoryObjects(tmp_path / "far")):
        calls = [store.check, partial(store.check, writing=True), store.list, partial(store.put, "a/x", b"1")]
        calls += [partial(store.get, "a/x"), partial(store.put_stream, "a/x", pieces(5), 5)]
        for call in calls:
            with pytest.raises(RemoteRefused, match="far") as caught:
                call()
            assert caught.value.action


@pytest.mark.parametrize("what", ["EACCES", "EPERM", "EROFS", "ENOTDIR", "EIO", "ESTALE", "ENOSPC", "EDQUOT"])
def test_what_only_the_user_can_change_is_told_from_what_may_pass(tmp_path, monkeypatch, what):
    store, number = DirectoryObjects(tmp_path), getattr(errno, what)

    def failing(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        for call in (lambda: store.check(writing=True), lambda: store.put_stream("x", pieces(5), 5)):
            with pytest.raises(RemoteFailed) as caught:
                call()
            assert isinstance(caught.value, RemoteRefused) == (what in ("EACCES", "EPERM", "EROFS", "ENOTDIR"))
            assert caught.value.action
    assert store.list() == {}


def test_a_directory_below_one_that_may_only_be_passed_through_is_no_refusal(tmp_path, monkeypatch):
    opening = os.open

    def refusing(path, *args, **options):
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opening(path, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    (tmp_path / "far").mkdir()
    DirectoryObjects(tmp_path / "far").check(writing=True)


@pytest.fixture
def answering(s3, monkeypatch):
    """Opens a store whose name has in it what other answers say, and whose server gives this answer."""

    def start(fault: object) -> S3Objects:
        s3.proxy.decide = lambda request: fault
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.proxy.endpoint)
        return S3Objects("bucket", "AccessDenied/MissingModality 403 Forbidden")

    return start


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ("403 Forbidden", "AccessDenied", "the key may not do this"),
        ("403 Forbidden", "RequestTimeTooSkewed", "Set the clock of this node"),
        ("403 Forbidden", "AnythingElse", "the object store refuses"),
        ("400 Bad Request", "ExpiredToken", "AWS_SESSION_TOKEN"),
        ("301 Moved Permanently", "PermanentRedirect", "AWS_REGION"),
        ("400 Bad Request", "InvalidBucketName", "no bucket has such a name"),
        ("501 Not Implemented", "NotImplemented", "conditional and multipart puts"),
        ("404 Not Found", "NoSuchBucket", "the bucket does not exist"),
    ],
)
def test_an_answer_that_only_the_user_can_change_is_a_refusal(answering, status, code, words):
    store = answering(answer(status, code))
    with pytest.raises(RemoteRefused, match=words):
        store.check()
    if code != "NoSuchBucket":  # as if there were no such object
        with pytest.raises(RemoteRefused, match=words):
            store.put("x", b"1")


@pytest.mark.parametrize("fault", ["reset", answer("503 Slow Down", "SlowDown"), answer("500 Error", "InternalError")])
def test_a_store_that_is_out_of_order_does_not_refuse_whatever_a_run_is_named_after(answering, fault):
    with pytest.raises(RemoteFailed) as caught:
        answering(fault).check()
    assert not isinstance(caught.value, RemoteRefused)


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
