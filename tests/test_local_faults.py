"""Saves on nodes while a disk fails or a rank dies: told to all, no trace on any node, and what was there is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from errno import EACCES, EIO, ENOSPC
from pathlib import Path

import pytest

from mpi_ckpt.errors import OutcomeUnknown, SaveFailed
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from tests.cluster import Cluster
from tests.programs.faults import Fault, Operation, watched
from tests.ranks import contents, error_of

mpi = pytest.mark.mpi(ranks=[4], timeout=180, unit="s")

NODES = "aabb"  # of ranks 0 to 3: 0 and 2 lead, and 0 and 2, 1 and 3 protect each other
STEP = "?/step_????????"
SHARD, PARITY, DESCRIPTOR = (f"{STEP}/rank*.{kind}" for kind in ("h5", "parity", "redundancy.json"))
MANIFEST = f"{STEP}/manifest.json"
ON_ANY_RANK = [
    ("open", f"{SHARD}.tmp", EACCES, 0),
    ("pwrite", f"{SHARD}.tmp", ENOSPC, 0),
    ("ftruncate", f"{SHARD}.tmp", EIO, 0),
    ("fsync", f"{SHARD}.tmp", EIO, 0),
    ("close", f"{SHARD}.tmp", EIO, 0),
    ("rename", SHARD, ENOSPC, 0),
    ("open", f"{PARITY}.tmp", ENOSPC, 0),
    ("pwrite", f"{PARITY}.tmp", ENOSPC, 0),
    ("pwrite", f"{PARITY}.tmp", EIO, 0),
    ("ftruncate", f"{PARITY}.tmp", EIO, 0),
    ("fsync", f"{PARITY}.tmp", EIO, 0),
    ("close", f"{PARITY}.tmp", EIO, 0),
    ("rename", PARITY, ENOSPC, 0),
    ("write", f"{DESCRIPTOR}.tmp", ENOSPC, 0),
    ("fsync", f"{DESCRIPTOR}.tmp", EIO, 0),
    ("rename", DESCRIPTOR, EIO, 0),
    *[("fsync", STEP, EIO, number) for number in range(3)],  # after each of these renames
]
ON_A_LEADER = [
    ("mkdir", STEP, ENOSPC, 0),
    ("fsync", "?", EIO, 0),
    ("open", f"{MANIFEST}.tmp", EACCES, 0),
    ("write", f"{MANIFEST}.tmp", ENOSPC, 0),
    ("fsync", f"{MANIFEST}.tmp", EIO, 0),
    ("close", f"{MANIFEST}.tmp", EIO, 0),
    ("rename", MANIFEST, EIO, 0),
    ("fsync", STEP, EIO, 3),  # after the manifest's rename
]


@contextlib.contextmanager
def faults_on(comm, rank: int, root: Path, *faults: Fault) -> Iterator[None]:
    """These faults, on one rank; each must have struck."""
    with contextlib.ExitStack() as stack:
        for fault in faults if comm.rank == rank else ():
            stack.enter_context(watched(root, fault))
        yield
    assert comm.rank != rank or all(fault.struck for fault in faults), "the fault was never met"


def files_on_nodes(cluster: Cluster) -> dict[str, bytes]:
    """**Collective.** Every file on every node, while nobody changes any."""
    cluster.comm.barrier()
    found = contents(cluster.path / "nodes")
    cluster.comm.barrier()
    return found


# -- a disk that fails -----------------------------------------------------------------------------------------------


@mpi
@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "again"])
def test_a_fault_in_any_phase_on_one_node_fails_the_save_on_all_and_leaves_no_trace(comm, shared_path, overwrite, rank):
    cluster = Cluster(comm, shared_path)
    cases = {0: ON_ANY_RANK + ON_A_LEADER, 2: ON_A_LEADER, 3: ON_ANY_RANK}[rank]
    with cluster.open(NODES) as checkpointer:
        checkpointer.save(10, cluster.state(10))
        before = files_on_nodes(cluster)
        step = 10 if overwrite else 20
        for call, pattern, code, skip in cases:
            with faults_on(comm, rank, shared_path / "nodes", Fault(call, pattern, code, skip=skip)):
                bad = cluster.state(11)
                error = error_of(comm, SaveFailed, lambda bad=bad: checkpointer.save(step, bad, overwrite=overwrite))
            assert type(error) is SaveFailed
            assert error.rank == rank
            assert f"[Errno {code}]" in str(error)
            assert str(cluster.node(NODES[rank])) in error.path
            assert files_on_nodes(cluster) == before, f"{call} {pattern}"
            assert checkpointer.all_steps() == [10]
    cluster.lose("ab"[rank < 2])  # the node whose disk did not fail: what is left must be enough
    assert cluster.restore(NODES) == 10
    cluster.save(NODES, 20)
    assert cluster.restore(NODES) == 20


@mpi
@pytest.mark.parametrize("rank", [0, 2])
def test_a_disk_that_fails_while_a_save_is_prepared_fails_it_on_all(comm, shared_path, monkeypatch, rank):
    """Where the node is looked at, its room and what is there, and where the step's directory is made."""
    cluster = Cluster(comm, shared_path)
    root = cluster.node(NODES[rank])
    directory = names.step_dir(root, 20)
    with cluster.open(NODES) as checkpointer:
        checkpointer.save(10, cluster.state(10))
        before = files_on_nodes(cluster)
        for call, path in (("scandir", root), ("statvfs", root), ("mkdir", directory), ("scandir", directory)):
            real = getattr(os, call)

            def failing(about, *rest, path=path, real=real):
                if comm.rank == rank and str(about) == str(path):
                    raise OSError(EIO, os.strerror(EIO), str(path))
                return real(about, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing)
                error = error_of(comm, SaveFailed, lambda: checkpointer.save(20, cluster.state(20)))
            assert (error.rank, error.path) == (rank, str(path))
            assert "[Errno 5]" in str(error)
            assert files_on_nodes(cluster) == before, f"{call} {path}"
    cluster.lose("ab"[rank < 2])
    assert cluster.restore(NODES) == 10
    cluster.save(NODES, 20)
    assert cluster.restore(NODES) == 20


@mpi
def test_when_a_manifest_cannot_be_taken_back_the_outcome_is_unknown_and_every_file_stays(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with cluster.open(NODES) as checkpointer:
        checkpointer.save(10, cluster.state(10))
        faults = Fault("fsync", STEP, EIO, skip=3), Fault("unlink", MANIFEST, EIO)
        with faults_on(comm, 2, shared_path / "nodes", *faults):
            error_of(comm, OutcomeUnknown, lambda: checkpointer.save(20, cluster.state(20)))
        files = [name for name in files_on_nodes(cluster) if "step_00000020" in name]
        assert sum(name.endswith((".h5", ".parity", ".redundancy.json")) for name in files) == 12
    cluster.lose("a")  # it took its manifest back, and the other has one: the step is there, and must be whole
    assert cluster.restore(NODES) == 20


@mpi
def test_with_one_step_kept_a_failed_save_costs_it_nothing(comm, shared_path):
    cluster = Cluster(comm, shared_path, local_keep=1)
    with cluster.open(NODES) as checkpointer:
        checkpointer.save(10, cluster.state(10))
        before = files_on_nodes(cluster)
        for rank, call, pattern in ((0, "fsync", f"{PARITY}.tmp"), (2, "rename", MANIFEST), (3, "pwrite", f"{SHARD}*")):
            with faults_on(comm, rank, shared_path / "nodes", Fault(call, pattern, ENOSPC)):
                error_of(comm, SaveFailed, lambda: checkpointer.save(20, cluster.state(20)))
            assert files_on_nodes(cluster) == before
    cluster.lose("b")
    assert cluster.restore(NODES) == 10
    cluster.save(NODES, 20)
    assert names.list_steps(cluster.node("a")) == names.list_steps(cluster.node("b")) == [20]


# -- a rank that dies ------------------------------------------------------------------------------------------------


class Clocked:
    """For `watched`: when each change was begun and done, on the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, float, float]] = []

    @contextlib.contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seen.append((operation.call, operation.path, began, time.monotonic()))


@mpi
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("scheme", ["xor", "partner"])
def test_every_file_is_durable_on_every_node_before_any_manifest_gets_its_name(comm, shared_path, scheme, overwrite):
    cluster, clocked = Cluster(comm, shared_path, scheme), Clocked()
    with cluster.open(NODES) as checkpointer:
        if overwrite:
            checkpointer.save(10, cluster.state(11))
        with watched(shared_path / "nodes", clocked):
            checkpointer.save(10, cluster.state(10), overwrite=overwrite)
    seen = [each for rank in comm.allgather(clocked.seen) for each in rank]

    def named(call: str, *ends: str) -> list[tuple[str, str, float, float]]:
        return [each for each in seen if each[0] == call and each[1].endswith(ends)]

    committing = named("rename", "/manifest.json")
    assert len(committing) == 2
    first, last = min(each[2] for each in committing), max(each[3] for each in committing)
    for kind in (".h5", ".parity", ".redundancy.json"):
        synced, renamed = named("fsync", f"{kind}.tmp"), named("rename", kind)
        assert len(synced) == len(renamed) == 4
        assert max(each[3] for each in synced + renamed) < first, f"{kind} after a manifest"
    directories = [each for each in named("fsync", "step_00000010") if each[2] < first]
    assert len(directories) == 12, "a name of a file that is not durable"
    assert max(each[3] for each in directories) < first
    assert max(each[3] for each in named("fsync", "manifest.json.tmp")) < first
    replaced = named("unlink", ".h5", ".parity", ".redundancy.json")
    assert len(replaced) == 12 * overwrite
    assert all(each[2] > last for each in replaced), "an old file went before the last new manifest was there"


def run_on_nodes(launch, tmp_path: Path, **task) -> dict:
    """The restarts' task, after a launch that did not survive `kill`."""
    about = {"root": str(tmp_path / "shared"), "local": f"{tmp_path}/nodes/{{domain}}", "domains": [*"abcd"]}
    killed = launch(4, "-m", "tests.programs.nodes", json.dumps({**about, **task}))
    assert killed.status != 0
    return about


@pytest.mark.parametrize(("kill", "lost", "steps"), [([0, -2], "c", [20]), ([1, 2], "a", [10, 20])])
def test_killed_between_the_renames_of_the_manifests_and_another_node_lost(launch, tmp_path, kill, lost, steps):
    """After the first rename the parity is there, and the step with it; before it, the one before."""
    about = run_on_nodes(launch, tmp_path, save=[10, 20], kill=kill)
    shutil.rmtree(tmp_path / "nodes" / lost)
    restart = launch(4, "-m", "tests.programs.nodes", json.dumps(about | {"restore": True, "save": [30]})).check()
    for found in json.loads(restart.stdout):  # the program has compared the contents
        assert found["error"] is None
        assert found["restored"] in steps
        assert found["steps"] == [found["restored"], 30]


@pytest.mark.parametrize("kill", [[1, 1], [2, -1]])
def test_killed_while_nodes_let_go_of_a_step_no_manifest_outlives_a_file_of_its_own(launch, tmp_path, kill):
    """Before the first manifest that the rank removes, and after it; the others have time to go on without it."""
    options = {"local_keep": 1, "async_io": False}
    about = run_on_nodes(launch, tmp_path, save=[10, 20, 30], kill=[*kill, "unlink"], options=options)
    nodes = [tmp_path / "nodes" / name for name in "abcd"]
    for node in nodes:
        for step in names.list_steps(node):
            for rank, shard in enumerate(read_manifest(names.step_dir(node, step)).shards):
                assert (names.step_dir(nodes[rank], step) / shard.path).is_file(), f"{node.name} lists step {step}"
    restart = launch(4, "-m", "tests.programs.nodes", json.dumps(about | {"restore": True})).check()
    assert [found["restored"] for found in json.loads(restart.stdout)] == [20] * 4
