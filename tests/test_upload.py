"""The second tier: launches that upload, are killed, meet a bad network, and come back from the far side alone."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_ckpt import Checkpointer
from mpi_ckpt.checkpoint import remote as remote_tier
from mpi_ckpt.checkpoint.retention import Policy
from mpi_ckpt.errors import MissingShard, RemoteFailed, RemoteRefused
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.remote_steps import (
    committed_remotely,
    list_remote,
    read_upload_manifest,
    write_upload_manifest,
)
from mpi_ckpt.tools.verify import verify_remote
from tests.checkpoints import manifest_of
from tests.launch import HANG, ROOT
from tests.proxy import Proxy, answer
from tests.ranks import contents
from tests.s3 import Remote
from tests.s3_server import READER
from tests.storage_cases import save_shard, to_write
from tests.tool_cases import verb

PROGRAM = ("-m", "tests.programs.uploader")


@pytest.fixture
def job(launch, remote, tmp_path):
    """Runs the program on ranks against the remote tier; gives what each rank says."""

    def start(ranks: int, *, root: Path | None = None, **task: Any) -> Any:
        about = {"root": str(root or tmp_path / "run"), "remote": remote.url} | task
        return launch.start(ranks, *PROGRAM, json.dumps(about), env=remote.env)

    def run(ranks: int, timeout: float = HANG, **task: Any) -> list[dict[str, Any]]:
        return outcome(start(ranks, **task), timeout)

    run.start = start
    return run


def outcome(job, timeout: float = HANG) -> list[dict[str, Any]]:
    return json.loads(job.wait(timeout).check().stdout.strip().splitlines()[-1])


def events(said: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The events of one kind, which every rank has seen for the same steps in the same order."""
    found = [[e for e in rank["events"] if e["event"] == kind] for rank in said]
    assert all([e["step"] for e in each] == [e["step"] for e in found[0]] for each in found)
    return found[0]


def steps(said: list[dict[str, Any]], kind: str) -> list[int]:
    return [e["step"] for e in events(said, kind)]


def until(running, condition: Callable[[], bool], timeout: float = HANG) -> None:
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
    said = job(4, save=[10, 20])
    assert steps(said, "upload") == [10, 20]
    assert is_whole(remote, 10, 20)
    assert all(len(list_remote(remote.store)[step].shards) == 4 for step in (10, 20))
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
        "writer.json",
    ]


def test_a_reader_sees_a_step_only_when_every_shard_is_there(job, remote):
    looks: list[list[int]] = []  # the committed steps, each time that they were others
    looked = 0  # how often

    def look() -> None:
        nonlocal looked
        listed = list_remote(remote.store)
        committed = [step for step, found in listed.items() if found.committed]
        assert all(len(listed[step].shards) == 2 for step in committed)
        if looks[-1:] != [committed]:
            looks.append(committed)
        looked += 1

    def decide(request) -> float | None:
        if not request.puts("upload_manifest"):
            return chance.uniform(0, 0.4) if request.method in ("PUT", "POST") else None
        before = looked
        until(running, lambda: looked > before + 1)  # a whole look at the step without its manifest
        return None

    chance = random.Random(1)
    if remote.proxy:
        remote.proxy.decide = decide
    running = job.start(2, save=[10, 20, 30], options={"keep": 3, "remote_bandwidth": 1e6})
    while running.process.poll() is None:
        look()
    outcome(running)
    look()
    expected = [[], [10], [10, 20], [10, 20, 30]]
    assert looks[-1] == expected[-1]
    assert [each for each in expected if each in looks] == looks, "a step came before an older one, or went"
    assert looks == expected or not remote.proxy
    assert is_whole(remote, 10, 20, 30)


def test_every_rank_sends_its_own_shard_and_in_parts(launch, s3, s3_server, tmp_path):
    """Each rank behind a proxy of its own."""
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(s3_server)) for _ in range(4)]
        ways = {f"WAY_{rank}": proxy.endpoint for rank, proxy in enumerate(proxies)}
        choose = 'eval export AWS_ENDPOINT_URL=\\$WAY_${PMI_RANK:-$OMPI_COMM_WORLD_RANK}; exec "$@"'
        about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10], "elements": 3_000_000}
        task = *PROGRAM, json.dumps(about)
        running = launch.start(4, *task, env={**s3.env, **ways}, wrap=("sh", "-c", choose, "sh"))
        assert steps(outcome(running), "upload") == [10]
    sizes = [shard["nbytes"] for shard in manifest_of(tmp_path / "run", 10)["shards"]]
    for rank, proxy in enumerate(proxies):
        sent = [proxy.sent(f"rank{other:05d}.h5") for other in range(4)]
        # A body that is signed piece by piece is a little longer than the bytes in it.
        assert sizes[rank] <= sent[rank] < sizes[rank] * 1.01
        assert sum(sent) == sent[rank], "bytes of another's"
        bodies = [request for request in proxy.requests if request.puts(".h5")]
        parts = [re.search(r"[?&]partNumber=(\d+)", request.path) for request in bodies]
        assert sorted(part and int(part[1]) for part in parts) == [1, 2]
    assert is_whole(s3, 10)


def test_before_its_manifest_a_step_is_not_there_and_a_restore_takes_the_one_before(s3, launch, tmp_path):
    remote = s3
    held = 600.0
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


@pytest.fixture
def place(shared_path) -> str:
    return f"file://{shared_path}/far"


class Watched:
    """A checkpointer on one rank with the events that it reports."""

    def __init__(self, comm, root: Path, place: str, **options: Any) -> None:
        self.said: list[dict[str, Any]] = []
        options = {"upload_timeout": 0.1} | options
        self.checkpointer = Checkpointer(root, comm, remote=place, on_event=self.said.append, **options)

    def __enter__(self) -> Watched:
        self.checkpointer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpointer.__exit__(*error)

    def save(self, step: int, then: str = "upload") -> dict[str, Any]:
        """The event `then` of the step, once it has come."""
        self.said.clear()
        self.checkpointer.save(step, {"x": np.full(9, float(step))}, overwrite=True)
        deadline = time.monotonic() + HANG
        while not (found := [each for each in self.said if each["event"] == then]):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)
        return found[-1]


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_of_two_launches_that_upload_to_one_place_the_earlier_one_is_told_and_changes_nothing(comm, shared_path, place):
    with Watched(comm, shared_path / "a", place) as first:
        first.save(10)
        with Watched(comm, shared_path / "b", place) as second:
            second.save(10)
            before = contents(shared_path / "far")
            assert "another launch uploads to the same place" in first.save(20, "upload_failed")["error"]
            with pytest.raises(RemoteFailed, match="another launch uploads to the same place"):
                first.checkpointer.discard_after(5)
            assert first.checkpointer.all_steps() == [10, 20], "here nothing is gone either"
            assert contents(shared_path / "far") == before, "it was told before it sent anything"
    assert contents(shared_path / "far") == before
    assert is_whole(Remote(place), 10)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_a_launch_changes_nothing_in_the_remote_tier_until_it_has_something_to_upload(comm, shared_path, place):
    """What another one is sending there looks just like what one that was killed has left."""
    store, sent = open_store(place), "step_00000005/0123456789abcdef/rank00000.h5"
    store.put(sent, b"on its way")
    store.put("writer.json", b'{"launch_id": "another"}')
    before = contents(shared_path / "far")
    with Watched(comm, shared_path / "a", place, upload_timeout=HANG):
        pass
    assert contents(shared_path / "far") == before
    with Watched(comm, shared_path / "a", place) as launch:
        launch.save(10)
    assert is_whole(Remote(place), 10)
    assert [*list_remote(store)] == [10], "now it is known to be left over"
    assert store.get("writer.json")[0] != before["writer.json"]


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_what_a_push_is_sending_beside_a_launch_is_not_left_over(comm, shared_path, place):
    store = open_store(place)
    with Watched(comm, shared_path / "a", place) as launch:
        launch.save(10)
        launch.save(20)
    store.delete(["step_00000010/upload_manifest.json"])  # as it is until a push of step 10 ends
    with Watched(comm, shared_path / "a", place, remote_keep=1) as launch:  # which would not upload it by itself
        launch.save(30)
    committed = {step: found.committed for step, found in list_remote(store).items()}
    assert committed == {10: False, 30: True}


def test_a_launch_whose_directory_is_anothers_by_now_does_not_claim_the_remote_tier(launch, s3, tmp_path):
    lock = tmp_path / "run" / "writer.lock"

    def decide(request) -> None:
        if "list-type" in request.path and lock.read_text():  # the launch has it, and looks what is missing
            lock.write_text('{"launch": "another"}')

    about = {"root": str(tmp_path / "run"), "remote": s3.url}
    outcome(launch.start(2, *PROGRAM, json.dumps({**about, "remote": None, "save": [10]}), env=s3.env))
    s3.proxy.decide = decide
    said = outcome(launch.start(2, *PROGRAM, json.dumps(about), env=s3.env))
    assert "this launch no longer owns the checkpoint directory" in events(said, "upload_failed")[0]["error"]
    assert s3.store.list() == {}


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_uploads_go_on_where_somebody_has_emptied_the_remote_tier(comm, shared_path, place):
    store = open_store(place)
    with Watched(comm, shared_path / "a", place) as launch:
        launch.save(10)
        claimed = store.get("writer.json")[0]
        store.delete([*store.list()])
        launch.save(20)
        assert store.get("writer.json")[0] == claimed
    assert is_whole(Remote(place), 20)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_a_launch_that_was_told_of_another_leaves_it_the_place_even_when_it_is_emptied(comm, shared_path, place):
    store = open_store(place)
    with Watched(comm, shared_path / "a", place) as first, Watched(comm, shared_path / "b", place) as second:
        first.save(10)
        second.save(10)
        for _ in range(2):
            with pytest.raises(RemoteFailed, match="another launch uploads to the same place"):
                first.checkpointer.discard_after(5)
            store.delete([*store.list()])
        assert store.list() == {}
        second.save(20)
    assert is_whole(Remote(place), 20)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_the_application_is_asked_before_anything_changes_in_the_remote_tier(comm, shared_path, place):
    store = open_store(place)
    store.put("owner", b"another")
    before = contents(shared_path / "far")
    asked: list[bool] = []  # each time: whether all was as before

    def refuse_anothers(given) -> None:
        asked.append(contents(shared_path / "far") == before)
        owner, version = given.get("owner")
        if owner == b"another":
            raise RemoteRefused("the place is another's")
        given.put("owner", b"mine", version)

    with Watched(comm, shared_path / "a", place, upload_timeout=HANG, before_upload=refuse_anothers) as launch:
        assert "the place is another's" in launch.save(10, "upload_failed")["error"]
        with pytest.raises(RemoteRefused, match="the place is another's"):
            launch.checkpointer.discard_after(5)
        assert launch.checkpointer.all_steps() == [10], "nothing is gone here either"
        assert asked
        assert all(asked)
        assert contents(shared_path / "far") == before
        store.put("owner", b"nobody", store.get("owner")[1])
        before, count = contents(shared_path / "far"), len(asked)
        launch.save(20)
        launch.save(30)
        assert asked[count:] == [True], "it has returned once"
    assert store.get("owner")[0] == b"mine"
    assert is_whole(Remote(place), 10, 20, 30)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_a_rollback_of_the_remote_tier_asks_the_application_too(comm, shared_path, place):
    with Watched(comm, shared_path / "a", place) as launch:
        launch.save(10)
    asked = []
    with Watched(comm, shared_path / "a", place, before_upload=lambda store: asked.append([*store.list()])) as launch:
        launch.checkpointer.discard_after(5)
        assert len(asked) == 1
        assert len(asked[0]) == 3, "a shard and its manifest, and the claim"
        launch.save(20)
    assert len(asked) == 1
    assert is_whole(Remote(place), 20)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_a_step_of_which_shards_go_while_its_manifest_is_put_is_not_said_to_be_in(comm, shared_path, place):
    """A push beside a launch that takes its shards for left over."""
    store = open_store(place)
    with Watched(comm, shared_path / "a", place) as launch:
        launch.save(10)
    manifest = read_upload_manifest(store, 10)
    store.delete(["step_00000010/upload_manifest.json"])

    class Tidied:
        url, get, list = store.url, store.get, store.list

        def put(self, *put: Any) -> bool:
            store.delete([*list_remote(store)[10].shards])
            return store.put(*put)

    with pytest.raises(MissingShard, match="not in the store"):
        write_upload_manifest(Tidied(), manifest)


def test_a_manifest_is_not_put_over_a_successors_however_late_it_comes(launch, s3, tmp_path):
    """While the first launch looks at the manifest's place, all shards seen, a second one uploads the same step."""
    program = (*PROGRAM, json.dumps({"root": str(tmp_path / "b"), "remote": s3.url, "save": [10], "seed": 5}))
    second = []

    def decide(request) -> None:
        if request.method == "GET" and "step_00000010/upload_manifest" in request.path and not second:
            second.append(launch(1, *program))  # past the proxy

    s3.proxy.decide = decide
    about = {"root": str(tmp_path / "a"), "remote": s3.url, "save": [10]}
    said = outcome(launch.start(1, *PROGRAM, json.dumps(about), env=s3.env))
    assert steps(json.loads(second[0].check().stdout), "upload") == [10]
    assert "another launch uploads to the same place" in events(said, "upload_failed")[0]["error"]
    assert is_whole(s3, 10)
    assert read_upload_manifest(s3.store, 10).save_id == manifest_of(tmp_path / "b", 10)["save_id"]


@pytest.mark.parametrize("task", [{"discard_after": 5}, {"save": [7], "options": {"remote_keep": 1}}])
def test_a_successors_steps_that_come_between_claim_and_listing_are_not_deleted(launch, s3, tmp_path, task):
    program = (*PROGRAM, json.dumps({"root": str(tmp_path / "b"), "remote": s3.url, "save": [10, 20]}))
    about = {"root": str(tmp_path / "a"), "remote": s3.url}
    outcome(launch.start(1, *PROGRAM, json.dumps({**about, "save": [5]}), env=s3.env))
    claimed, second, one = [], [], threading.Lock()
    # A listing of all, after the claim; of the upload the one that follows the commit.
    after = "writer.json" if "discard_after" in task else "step_00000007/upload_manifest"

    def decide(request) -> None:
        claimed.extend([request] * request.puts(after))
        with one:
            if (
                claimed
                and "list-type" in request.path
                and "step_" not in request.path.split("prefix=")[1]
                and not second
            ):
                second.append(launch(1, *program))  # past the proxy

    s3.proxy.decide = decide
    running = launch.start(1, *PROGRAM, json.dumps({**about, **task}), env=s3.env)
    running.wait()
    second[0].check()
    assert "another launch uploads to the same place" in running.output()
    assert set(committed_remotely(s3.store)) >= {5, 10, 20}
    assert all(verdict.intact for verdict in verify_remote(s3.store, [5, 10, 20]))


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


def test_an_upload_takes_at_most_32_mib_more_memory(s3, tmp_path):
    path, record = save_shard(tmp_path, [to_write("a", np.ones(13_000_000))])  # 104 MB
    (tmp_path / "record").write_bytes(pickle.dumps(record))
    program = f"""
import pickle
from pathlib import Path
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.places import RemoteFile
from mpi_ckpt.storage.shard_stream import send_shard

def mib(name):
    return int(next(x for x in open("/proc/self/status") if x.startswith(name)).split()[1]) / 1024

record = pickle.loads(Path({str(tmp_path / "record")!r}).read_bytes())
store = open_store({s3.url!r})
store.check()
Path("/proc/self/clear_refs").write_text("5")  # VmHWM is VmRSS again: proc(5)
before = mib("VmRSS")
print(send_shard(store, RemoteFile(store.url, "rank00000.h5"), Path({str(path)!r}), record, lambda nbytes: None))
print(mib("VmHWM") - before)
"""
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    sent, memory = child.stdout.split()
    assert int(sent) == record.nbytes == s3.store.size("rank00000.h5")
    assert float(memory) <= 32


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
    running = launch.start(2, *PROGRAM, json.dumps(about), env=s3.env)
    said = outcome(running)
    assert lost
    assert not events(said, "upload_failed")
    assert "uploading step 10" not in running.output(), "an attempt that failed"
    (uploaded,) = events(said, "upload")
    # A second attempt would find the shards there, and send none.
    assert uploaded["sent_nbytes"] == sum(shard["nbytes"] for shard in manifest_of(tmp_path / "run", 10)["shards"])
    assert is_whole(s3, 10)


def test_a_step_is_not_uploaded_before_its_manifest_was_read_back(launch, s3, tmp_path):
    """The store takes it, and does not give it back for a while: all the time the step is kept, and not reported."""
    run, key = tmp_path / "run", "step_00000010/upload_manifest"
    put, read, refused = [], [], []

    def decide(request):
        if request.puts(key):
            put.append(request)
        elif request.method == "GET" and key in request.path and put and not read:
            if len(refused) < 3 or local_steps(run) != [10, 20]:  # with keep=1 the older one would go now
                refused.append(local_steps(run))
                return "503"
            read.append(time.monotonic())
        return None

    s3.proxy.decide = decide
    about = {"root": str(run), "remote": s3.url, "save": [10, 20], "options": {"keep": 1}}
    said = outcome(launch.start(2, *PROGRAM, json.dumps(about), env=s3.env))
    assert len(refused) >= 3
    assert all(10 in steps for steps in refused)
    told = [event for event in said[0]["events"] if event["event"] in ("upload", "upload_failed", "prune")]
    assert (told[0]["event"], told[0]["step"]) == ("upload", 10)
    assert all(event["at"] > read[0] for event in told)
    assert is_whole(s3, 10, 20)


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


def test_what_is_uploaded_first_hides_no_older_step_that_is_not(launch, s3, tmp_path):
    """The store lists nothing when the launch begins, and for a while after it has saved a step."""
    about = {"root": str(tmp_path / "run"), "options": {"keep": 3}}
    outcome(launch.start(2, *PROGRAM, json.dumps({**about, "remote": None, "save": [10, 20]}), env=s3.env))
    refused = []  # after the commit: all of the program's own look, and of the upload's

    def decide(request) -> str | None:
        if "list-type" not in request.path or len(refused) == 9:
            return None
        if (tmp_path / "run" / "step_00000030" / "manifest.json").exists():
            refused.append(request)
        return "503"

    s3.proxy.decide = decide
    running = launch.start(2, *PROGRAM, json.dumps({**about, "remote": s3.url, "save": [30]}), env=s3.env)
    assert sorted(steps(outcome(running), "upload")) == [10, 20, 30]
    assert "cannot see what is uploaded already" in running.output()
    assert is_whole(s3, 10, 20, 30)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_a_step_that_was_not_uploaded_before_a_later_one_was_is_not_forgotten(comm, shared_path, place, caplog):
    root = shared_path / "a"
    with Checkpointer(root, comm, keep=None) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, {"x": np.full(9, float(step))})
    assert verb("push", root, "--remote", place, "--step", 20).status == 0
    with caplog.at_level(logging.WARNING), Watched(comm, root, place, keep=None, upload_timeout=HANG) as launch:
        pass
    assert [event["step"] for event in launch.said if event["event"] == "upload"] == [10, 30]
    assert is_whole(Remote(place), 10, 20, 30)
    assert "which a restart would take" not in caplog.text, "that is said of a step that goes behind what is there only"
    with caplog.at_level(logging.WARNING), Watched(comm, shared_path / "b", place) as launch:
        launch.save(15)
    assert "step 15 is uploaded while step 30 is there, which a restart would take" in caplog.text


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
@pytest.mark.parametrize(
    ("policy", "missing"),
    [
        (Policy(None), [10, 20, 30, 50]),
        (Policy(4), [20, 30, 50]),
        (Policy(1), [50]),
        (Policy(1, keep_every=20), [20, 50]),
        (Policy(1, best_metric="loss"), [30, 50]),
        (Policy(1, best_metric="loss", best_mode="max"), [50]),  # 40, which is there
    ],
)
def test_what_an_earlier_launch_did_not_upload_is_what_the_remote_tier_would_keep(
    comm, shared_path, place, policy, missing
):
    root, store = shared_path / "a", open_store(place)
    with Checkpointer(root, comm, keep=None) as checkpointer:
        for step, loss in ((10, 4.0), (20, 3.0), (30, 1.0), (40, 5.0), (50, 2.0)):
            checkpointer.save(step, {"x": np.full(9, float(step))}, metrics={"loss": loss})
    assert verb("push", root, "--remote", place, "--step", 40).status == 0
    (root / "step_00000040" / "manifest.json").unlink()  # as if pruned: what is there counts all the same
    assert remote_tier.look(store, root, policy, remote_tier.Seen()) == missing
    (root / "step_00000010" / "pinned").touch()
    assert remote_tier.look(store, root, policy, remote_tier.Seen()) == sorted({10, *missing})


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


def test_a_retired_step_loses_its_manifest_before_its_shards(launch, s3, tmp_path):
    states = []  # of step 10, at each request to delete something

    def decide(request) -> None:
        if request.method == "DELETE" or (request.method == "POST" and request.path.endswith("?delete")):
            listed = list_remote(s3.store).get(10)
            states.append((listed.committed, len(listed.shards)) if listed else None)

    s3.proxy.decide = decide
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10, 20], "options": {"remote_keep": 1}}
    outcome(launch.start(2, *PROGRAM, json.dumps(about), env=s3.env))
    assert states[:2] == [(True, 2), (False, 2)]
    assert all(state is None or not state[0] for state in states[1:])
    assert [*list_remote(s3.store)] == [20]


def test_a_launch_that_is_superseded_while_it_commits_deletes_nothing(launch, s3, tmp_path):
    other = b'{"launch_id": "another"}'

    def decide(request) -> None:
        if request.puts("step_00000020/upload_manifest") and s3.store.get("writer.json")[0] != other:
            s3.store.put("writer.json", other, s3.store.get("writer.json")[1])

    s3.proxy.decide = decide
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10, 20], "options": {"remote_keep": 1}}
    running = launch.start(2, *PROGRAM, json.dumps(about), env=s3.env)
    assert steps(outcome(running), "upload") == [10, 20]
    assert "cannot delete from the remote tier, going on: another launch uploads to the same place" in running.output()
    assert is_whole(s3, 10, 20)


def test_a_step_of_which_only_the_manifest_could_be_deleted_goes_after_the_next_commit(launch, s3, tmp_path):
    deletions = []

    def decide(request) -> str | None:
        if "?delete" not in request.path:
            return None
        deletions.append(request)
        return answer("403 Forbidden", "AccessDenied") if len(deletions) == 2 else None  # the shards of step 10

    s3.proxy.decide = decide
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "save": [10, 20, 30, 40]}
    options = {"keep": 1, "remote_keep": 1}
    said = outcome(launch.start(2, *PROGRAM, json.dumps({**about, "pause": 1.0, "options": options}), env=s3.env))
    assert steps(said, "upload") == [10, 20, 30, 40]
    assert len(deletions) > 2
    assert [*list_remote(s3.store)] == [40]


def test_the_best_step_stays_in_the_remote_tier_as_it_does_in_the_local_one(job, remote, tmp_path):
    metrics = {str(step): {"loss": loss} for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5))}
    about = {"metrics": metrics, "options": {"keep": 4, "remote_keep": 1, "best_metric": "loss"}}
    job(2, save=[10, 20, 30], **about)
    assert committed_remotely(remote.store) == [20, 30]
    shutil.rmtree(tmp_path / "run")  # the next launch knows of them from the store alone
    job(2, save=[40], **about)
    assert is_whole(remote, 20, 40)


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
    failing.wait()
    text = running.output() + failing.output() + s3.store.get("step_00000010/upload_manifest.json")[0].decode()
    text += "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.json"))
    for secret in (s3.env["AWS_SECRET_ACCESS_KEY"], s3.env["AWS_ACCESS_KEY_ID"], wrong["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in text


@pytest.mark.parametrize(
    ("change", "url", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-wrong-wrong"}, None, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "NOBODY-HERE"}, None, "InvalidAccessKeyId"),
        (READER, None, "AccessDenied"),
        ({}, "s3://no-such-bucket/x", "NoSuchBucket"),
        ({}, "http://bucket/x", "s3://bucket/prefix or file:///directory"),
        ({"PYTHONPATH": "{hidden}"}, None, "pip install obstore"),
    ],
)
def test_what_only_the_user_can_change_is_said_at_once_on_every_rank(launch, s3, tmp_path, change, url, words):
    hidden = tmp_path / "hidden" / "obstore"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('as if it were not installed')")
    change = {name: value.replace("{hidden}", f"{tmp_path}/hidden:{ROOT}") for name, value in change.items()}
    about = {"root": str(tmp_path / "run"), "remote": url or s3.url, "save": [10]}
    running = launch.start(3, *PROGRAM, json.dumps(about), env={**s3.env, **change})
    errors = [rank["error"] for rank in outcome(running)]
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
