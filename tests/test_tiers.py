"""All tiers in one run, memory as one of them, and the trainer's ways of leaving and going back with nodes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from mpi_ckpt.storage import names
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.remote_steps import committed_remotely
from mpi_ckpt.train.status import PREEMPTED
from tests.cluster import Cluster
from tests.training import committed, events, losses, same_end, wait_for_step

mpi = pytest.mark.mpi(ranks=[4], timeout=60, unit="s")


def lose(comm, directory: Path) -> None:
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(directory)
    comm.barrier()


@mpi
@pytest.mark.parametrize("async_io", [False, True], ids=["sync", "async"])
def test_each_tier_gives_back_what_those_before_it_have_lost(comm, shared_path, async_io):
    """Every save to the nodes, every second one shared, and what is shared uploaded; the contents are compared."""
    url = f"file://{shared_path}/far"
    cluster = Cluster(comm, shared_path, shared_every=2, local_keep=3, remote=url, keep=None, async_io=async_io)
    cluster.save("abcd", 10, 20, 30)
    assert names.list_steps(shared_path / "shared") == [20]
    assert committed_remotely(open_store(url)) == [20]
    assert cluster.restore("abcd") == 30, "from the nodes"
    lose(comm, cluster.node("b"))
    assert cluster.restore("abcd") == 30, "from the nodes that are left"
    lose(comm, shared_path / "nodes")
    assert cluster.restore("abcd") == 20, "from the shared tier"
    lose(comm, shared_path / "nodes")
    lose(comm, shared_path / "shared")
    assert cluster.restore("abcd") == 20, "from the remote tier"
    lose(comm, shared_path / "far")
    cluster.save("abcd", 40, 50)  # the run goes on, on all of them
    assert committed_remotely(open_store(url)) == [50]


@mpi
def test_one_damaged_shard_in_every_tier_costs_no_step_that_another_tier_has(comm, shared_path):
    url = f"file://{shared_path}/far"
    cluster = Cluster(comm, shared_path, "single", shared_every=1, remote=url)
    cluster.save("abcd", 10)

    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    if comm.rank == 0:
        spoil(cluster.node("a") / "step_00000010/rank00000.h5")
        spoil(shared_path / "shared/step_00000010/rank00001.h5")
        spoil(next((shared_path / "far").rglob("rank00002.h5")))
    comm.barrier()
    assert cluster.restore("abcd") == 10


@pytest.fixture
def memory(comm):
    """A directory of the machine's memory, which all ranks see."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="mpi_ckpt-test-", dir="/dev/shm") if comm.rank == 0 else None))
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


@mpi
def test_memory_of_the_nodes_is_a_tier_and_a_lost_one_comes_back(comm, shared_path, memory):
    cluster = Cluster(comm, shared_path, local=f"{memory}/{{domain}}")
    cluster.save("abcd", 10, 20)
    before = (memory / "c/step_00000020/rank00002.h5").read_bytes()
    lose(comm, memory / "c")
    assert cluster.restore("abcd") == 20
    assert [event["rebuilt"] for event in cluster.named("rebuild")] == [["rank00002.h5"]]
    assert (memory / "c/step_00000020/rank00002.h5").read_bytes() == before
    assert not names.list_steps(shared_path / "shared")
    lose(comm, memory / "a")
    assert cluster.restore("abcd") == 20


# -- the training program --------------------------------------------------------------------------------------------

ON_NODES = "--run-dir", "run", "--local", "nodes/{domain}"
A_NODE_A_RANK = {"MPI_CKPT_DOMAIN": "node{rank}"}


def lose_node(launch, rank: int) -> None:
    shutil.rmtree(launch.cwd / f"nodes/node{rank}")


def test_a_rollback_goes_back_on_the_nodes_and_what_is_saved_after_it_is_protected(launch):
    flags = "--ckpt-every", "5steps", "--steps", "12", "--token-noise", "0.1", "--inject", "nan:8:1"
    launch.train(2, "--run-dir", "whole", *flags).check()
    launch.train(2, *ON_NODES, *flags, "--stop-at", "10", env=A_NODE_A_RANK).check()
    run, whole = launch.cwd / "run", launch.cwd / "whole"
    (rollback,) = events(run, "rollback")
    assert (rollback["step"], rollback["target"]) == (8, 5)
    assert events(run, "rollback") == events(whole, "rollback")
    lose_node(launch, 0)
    again = launch.train(2, *ON_NODES, *flags, env=A_NODE_A_RANK).check()
    assert "resumed run after step 10 from the nodes; rebuilt rank00000.h5\n" in again.stdout
    assert [event["step"] for event in events(run, "restore")] == [5, 10]
    assert losses(run) == losses(whole)


def test_fewer_ranks_go_on_from_the_nodes_that_are_left_as_they_would_from_the_shared_tier(launch):
    flags = "--ckpt-every", "4steps", "--steps", "12", "--no-async-io"
    launch.train(3, "--run-dir", "shared", *flags, "--stop-at", "8").check()
    launch.train(3, *ON_NODES, *flags, "--inject", "kill:9:0", env=A_NODE_A_RANK)
    assert committed(launch.cwd / "run") == []
    lose_node(launch, 2)
    launch.train(2, "--run-dir", "shared", *flags, "--elastic").check()
    launch.train(2, *ON_NODES, *flags, "--elastic", "--shared-every", "1", env=A_NODE_A_RANK).check()
    assert [event["step"] for event in events(launch.cwd / "run", "restore")] == [8]
    same_end(launch.cwd / "run", launch.cwd / "shared", 12)


def test_asked_to_leave_it_saves_on_the_nodes_and_a_lost_one_changes_nothing(launch):
    flags = "--steps", "300", "--ckpt-every", "100steps", "--token-noise", "0.1"
    launch.train(2, "--run-dir", "whole", *flags).check()
    job = launch.start(2, "-m", "mpi_ckpt.train", *ON_NODES, *flags, env=A_NODE_A_RANK)
    wait_for_step(job, launch.cwd / "run", 10)
    os.kill(job.ranks()[1], signal.SIGUSR1)
    left = job.wait()
    assert left.status == PREEMPTED, left.stderr
    (asked,) = events(launch.cwd / "run", "preemption")
    assert asked["reason"] == "SIGUSR1"
    assert 10 <= asked["step"] < 300
    for rank in range(2):
        assert names.list_steps(launch.cwd / f"nodes/node{rank}/run")[-1] == asked["step"]
    lose_node(launch, 1)
    again = launch.train(2, *ON_NODES, *flags, env=A_NODE_A_RANK).check()
    assert "from the nodes; rebuilt rank00001.h5" in again.stdout
    assert [event["step"] for event in events(launch.cwd / "run", "restore")] == [asked["step"]]
    same_end(launch.cwd / "run", launch.cwd / "whole", 300)
