"""The node-local tier after damage: what lies intact on some node is found, whatever else there is beside it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt import PerRank
from mpi_ckpt.errors import LayoutMismatch
from mpi_ckpt.redundancy.descriptor import read_descriptor
from tests.checkpoints import flip, on_one
from tests.cluster import Cluster
from tests.ranks import contents, error_of
from tests.tool_cases import verb

STEP = "step_00000010"
FOUR = pytest.mark.mpi(ranks=[4], timeout=60, unit="s")


def of_step(cluster: Cluster, node: str) -> Path:
    return cluster.node(node) / STEP


def restores_and_is_protected(cluster: Cluster, of: str, node: str) -> None:
    """**Collective.** Step 10 comes back from the nodes, and again when `node` is lost, with all its redundancy."""
    assert cluster.restore(of) == 10
    cluster.lose(node)
    assert cluster.restore(of) == 10
    assert cluster.named("rebuild")[-1]["encoded"], "the parity that was lost too"
    assert not cluster.named("local_loss")


# -- protected anew, in part -------------------------------------------------------------------------------------------


def protect_in_part(cluster: Cluster, new: str) -> None:
    """**Collective.** As it is when all are killed while ranks that were placed aabb are protected anew for abab: the
    redundancy of the ranks `new` is published, that of the others is still the one before."""
    cluster.save("aabb", 10)
    before = cluster.path / "before"
    on_one(cluster.comm, lambda: shutil.copytree(cluster.path / "nodes", before))
    assert cluster.restore("abab") == 10

    def put_back() -> None:
        for rank, (old, now) in enumerate(zip("aabb", "abab", strict=True)):
            for kind in ("parity", "redundancy.json") if str(rank) not in new else ():
                name = f"{STEP}/rank{rank:05d}.{kind}"
                shutil.copy(before / old / name, cluster.node(now) / name)

    on_one(cluster.comm, put_back)
    cluster.events.clear()


@FOUR
@pytest.mark.parametrize("new", ["01", "0", "12", "023", ""])
@pytest.mark.parametrize("scheme", ["partner", "xor"])
def test_killed_while_ranks_were_protected_anew_a_step_is_whole_and_protected_again(comm, shared_path, scheme, new):
    cluster = Cluster(comm, shared_path, scheme)
    protect_in_part(cluster, new)
    restores_and_is_protected(cluster, "abab", "b")


@FOUR
def test_the_tools_too_find_what_is_whole_between_two_protections(comm, shared_path):
    cluster = Cluster(comm, shared_path, "partner")
    protect_in_part(cluster, "01")
    if comm.rank == 0:
        nodes = [cluster.node(name) for name in "ab"]
        said = verb("scavenge", "--local", *nodes, "--out", shared_path / "shared")
        assert said.status == 0, said
        assert verb("verify", shared_path / "shared").status == 0
        said = verb("repair", *nodes)
        assert said.status == 0, said
    comm.barrier()


@FOUR
def test_a_protection_that_fails_on_one_rank_leaves_a_step_that_the_next_launch_restores(
    comm, shared_path, monkeypatch
):
    """Its second rename of a descriptor fails: the first is of the old group, for the nodes that there are now."""
    cluster = Cluster(comm, shared_path, "partner")
    cluster.save("abcd", 10)
    cluster.lose("c", "d")
    real, seen = os.rename, []

    def failing(source, target) -> None:
        if str(target).endswith("rank00003.redundancy.json"):
            seen.append(target)
            if len(seen) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        assert cluster.restore("abab") == 10
    assert len(seen) == 2 * (comm.rank == 3)
    assert cluster.named("rebuild")[-1]["weak"]
    restores_and_is_protected(cluster, "abab", "a")


@FOUR
@pytest.mark.parametrize(("scheme", "of"), [("xor", "abcd"), ("xor", "bcda"), ("single", "badc")])
def test_shards_that_all_lie_somewhere_need_no_redundancy(comm, shared_path, scheme, of):
    cluster = Cluster(comm, shared_path, scheme)
    cluster.save("abcd", 10)

    def strip() -> None:
        for path in [*cluster.path.rglob("*.redundancy.json"), *cluster.path.rglob("*.parity")]:
            path.unlink()

    on_one(comm, strip)
    if scheme == "single":
        assert cluster.restore(of) == 10
    else:
        restores_and_is_protected(cluster, of, "c")
    assert cluster.named("rebuild")[0]["weak"] == ([] if scheme == "xor" else [(0,), (1,), (2,), (3,)])


@FOUR
def test_a_damaged_descriptor_of_an_intact_shard_without_redundancy_is_no_loss(comm, shared_path):
    cluster = Cluster(comm, shared_path, "single")
    cluster.save("abcd", 10)
    path = of_step(cluster, "b") / "rank00001.redundancy.json"
    on_one(comm, lambda: flip(path, 40))
    assert cluster.restore("abcd") == 10
    assert not cluster.named("local_loss")
    assert read_descriptor(path).mine.rank == 1


# -- what is damaged ---------------------------------------------------------------------------------------------------


def save_twice(cluster: Cluster) -> None:
    """**Collective.** Step 10 of the nodes acd as saved last, and b, back again, with its own of an earlier save."""
    with cluster.open("abcd", local_keep=5) as checkpointer:
        checkpointer.save(5, cluster.state(5))
        checkpointer.save(10, cluster.state(11))
    old = cluster.path / "old"
    on_one(cluster.comm, lambda: shutil.copytree(of_step(cluster, "b"), old))
    with cluster.open("abcd", local_keep=5) as checkpointer:
        checkpointer.discard_after(5)
        checkpointer.save(10, cluster.state(10))
    cluster.comm.barrier()  # every node is free now


def bring_back(cluster: Cluster) -> None:
    """**Local.** The node b is replaced by the one of before."""
    assert (cluster.path / "old/rank00001.h5").stat().st_size == (of_step(cluster, "b") / "rank00001.h5").stat().st_size
    shutil.rmtree(of_step(cluster, "b"))
    shutil.copytree(cluster.path / "old", of_step(cluster, "b"))


@FOUR
@pytest.mark.parametrize("what", ["descriptor lost", "descriptor damaged", "of another save"])
def test_the_tools_compare_a_shard_with_the_manifest_whatever_lies_beside_it(comm, shared_path, what):
    cluster = Cluster(comm, shared_path)
    save_twice(cluster)
    if comm.rank == 0:
        before, node = contents(shared_path / "nodes"), of_step(cluster, "b")
        if what == "of another save":
            bring_back(cluster)
        else:
            flip(node / "rank00001.h5", 6000)
            descriptor = node / "rank00001.redundancy.json"
            flip(descriptor, 40) if what == "descriptor damaged" else descriptor.unlink()
        nodes = [cluster.node(name) for name in "abcd"]
        said = verb("scavenge", "--local", *nodes, "--out", shared_path / "shared", "--json")
        assert (said.status, said.json and said.json["rebuilt"]) == (0, ["rank00001.h5"]), said
        said = verb("repair", *nodes, "--json")
        assert (said.status, said.json and said.json["shards"]) == (0, [str(node / "rank00001.h5")]), said
        after = contents(shared_path / "nodes")
        assert {name for name in before if "step_" in name and after.get(name) != before[name]} == set()
    comm.barrier()
    shutil.rmtree(shared_path / "shared", ignore_errors=True)
    comm.barrier()
    assert cluster.restore("abcd") == 10


@FOUR
def test_a_node_that_comes_back_with_an_earlier_save_counts_as_one_lost(comm, shared_path):
    cluster = Cluster(comm, shared_path, "rs:2+2")
    save_twice(cluster)
    on_one(comm, lambda: bring_back(cluster))
    cluster.lose("c")
    assert cluster.restore("abcd") == 10
    assert cluster.named("rebuild")[-1]["rebuilt"] == ["rank00001.h5", "rank00002.h5"]


@FOUR
@pytest.mark.parametrize("of", ["acbd", "dabc", "abxd"])
def test_a_damaged_file_is_made_again_wherever_its_rank_runs_now(comm, shared_path, of):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10)
    if "x" in of:  # the node lives on, under a new name
        on_one(comm, lambda: cluster.node("c").rename(cluster.node("x")))
    on_one(comm, lambda: flip(of_step(cluster, "b") / "rank00001.h5", 6000))
    assert cluster.restore(of) == 10
    assert not cluster.named("local_loss")
    assert "rank00001.h5" in cluster.named("rebuild")[-1]["rebuilt"]


@FOUR
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_are_not_protected_anew_by_a_damaged_file(comm, shared_path, rank):
    """Rank 1 moves with its file, rank 0 stays: the old redundancy has to give it back before it is replaced."""
    cluster = Cluster(comm, shared_path)
    cluster.save("aabb", 10)
    on_one(comm, lambda: flip(of_step(cluster, "a") / f"rank{rank:05d}.h5", 6000))
    restores_and_is_protected(cluster, "abab", "b")


@FOUR
@pytest.mark.parametrize("of", ["abcd", "bacd"])
def test_a_file_that_the_disk_cannot_read_is_lost_like_a_damaged_one(comm, shared_path, monkeypatch, of):
    cluster = Cluster(comm, shared_path, "rs:2+2")
    cluster.save("abcd", 10)
    cluster.lose("d")
    bad, real = str(of_step(cluster, "b") / "rank00001.h5"), os.preadv
    kept = open(bad, "rb")  # noqa: SIM115 - so that no other file gets its inode
    inode = os.fstat(kept.fileno()).st_ino  # what is made again in its place can be read

    def failing(fd: int, *args) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *args)

    comm.barrier()
    monkeypatch.setattr(os, "preadv", failing)
    with kept:
        assert cluster.restore(of) == 10
    assert not cluster.named("local_loss")
    assert {"rank00001.h5", "rank00003.h5"} <= {*cluster.named("rebuild")[-1]["rebuilt"]}


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("damaged", ["a", "c", "d"])
@pytest.mark.parametrize("lost", ["node", "descriptor"])
def test_parity_is_never_made_from_damaged_data(comm, shared_path, damaged, lost):
    cluster = Cluster(comm, shared_path, "rs:2+2")
    cluster.save("abcd", 10)

    def files() -> dict[str, bytes]:
        comm.barrier()
        return {name: data for name, data in contents(shared_path / "nodes").items() if "/rank" in name}

    before = files()
    comm.barrier()
    if comm.rank == 0:
        file = of_step(cluster, damaged) / f"rank0000{'abcd'.index(damaged)}.h5"
        data = bytearray(file.read_bytes())
        data[len(data) * 7 // 10] ^= 1
        file.write_bytes(data)
        if lost == "descriptor":
            (of_step(cluster, "b") / "rank00001.redundancy.json").unlink()
    if lost == "node":
        cluster.lose("b")
    comm.barrier()
    assert cluster.restore("abcd") == 10
    assert files() == before


# -- shards that are fetched for a while -------------------------------------------------------------------------------


def shards_by_node(cluster: Cluster) -> dict[str, list[str]]:
    """**Collective.**"""
    cluster.comm.barrier()
    found = {node: sorted(path.name for path in of_step(cluster, node).glob("*.h5*")) for node in "abcd"}
    cluster.comm.barrier()
    return found


def own_alone(nodes: str) -> dict[str, list[str]]:
    return {node: [f"rank{rank:05d}.h5"] for rank, node in enumerate(nodes)}


@FOUR
def test_no_fetched_shard_stays_on_a_node(comm, shared_path):
    """Rank 0 has stored the replicated array, so every node fetches its shard."""
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10)
    assert cluster.restore("abcd") == 10
    assert shards_by_node(cluster) == own_alone("abcd")


@FOUR
def test_no_fetched_shard_stays_after_a_restore_that_fails(comm, shared_path):
    cluster = Cluster(comm, shared_path, "rs:2+2")
    cluster.save("abcd", 10)
    few = comm.Split(0 if comm.rank < 2 else 1)
    if comm.rank < 2:
        with cluster.open("ab", few) as checkpointer:
            before = contents(shared_path / "nodes")
            few.barrier()
            state = cluster.state(None, few) | {"own": PerRank(0)}  # nobody says what two ranks make of four values
            error_of(few, LayoutMismatch, lambda: checkpointer.restore(state, world_size="any"))
            few.barrier()
            left = {name for name in contents(shared_path / "nodes") if name not in before and name.endswith(".h5")}
            hosted = {f"a/{STEP}/rank00002.h5", f"b/{STEP}/rank00003.h5"}
            assert left == hosted, "those that the two ranks look after, and no other"
    comm.barrier()


@FOUR
def test_a_damaged_copy_that_a_killed_restore_has_left_is_fetched_again(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10)

    def leave_damaged_copy() -> None:
        data = np.fromfile(of_step(cluster, "a") / "rank00000.h5", np.uint8)
        data[4096::64] ^= 1
        data.tofile(of_step(cluster, "b") / "rank00000.h5")

    on_one(comm, leave_damaged_copy)
    assert cluster.restore("abcd") == 10
    assert not cluster.named("local_loss")
    assert shards_by_node(cluster) == own_alone("abcd")


@FOUR
def test_a_damaged_shard_is_not_fetched_in_the_place_of_an_intact_copy(comm, shared_path):
    """Nothing but the copy on b, left by ranks that have moved or by a killed restore, can give rank 0's back."""
    cluster = Cluster(comm, shared_path, "single")
    cluster.save("abcd", 10)
    path, copy = (of_step(cluster, node) / "rank00000.h5" for node in "ab")
    on_one(comm, lambda: shutil.copy(path, copy))
    on_one(comm, lambda: flip(path, 6000))
    assert cluster.restore("abcd") == 10
    assert not cluster.named("local_loss")
    assert cluster.named("rebuild")[-1]["moved"] == ["rank00000.h5"]
