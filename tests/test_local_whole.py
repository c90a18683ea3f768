"""A step whose nodes have lost too much is completed from the tiers behind them, and is whole on the nodes again."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt import PerRank
from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.storage.manifest import read_manifest
from tests.checkpoints import first_ranks, flip, on_one
from tests.cluster import Cluster
from tests.ranks import error_of, same_everywhere

FOUR = pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
STEP = "step_00000010"


def shard(directory: Path, rank: int) -> Path:
    return directory / STEP / f"rank{rank:05d}.h5"


def fetched(cluster: Cluster) -> dict[str, list[str]]:
    """**Collective.** What the only loss says of the shards from other tiers, the same on every rank."""
    (loss,) = cluster.named("local_loss")
    assert loss["step"] == 10
    assert "is lost" in loss["error"] or "no node holds" in loss["error"]
    return same_everywhere(cluster.comm, loss["fetched"])


def without_the_shared_tier(cluster: Cluster, lost: str, of: str = "abcd") -> None:
    """**Collective.** Step 10 comes back from the nodes alone, without one of them if its scheme can do that."""
    on_one(cluster.comm, lambda: shutil.rmtree(cluster.path / "shared"))
    cluster.lose(*lost)
    cluster.events.clear()
    assert cluster.restore(of) == 10
    assert not cluster.named("local_loss")


# -- which shard comes from where ------------------------------------------------------------------------------------


@FOUR
@pytest.mark.parametrize(
    ("scheme", "lost", "missing"), [("xor", "bc", "12"), ("partner", "bd", "13"), ("rs:2+2", "abc", "012")]
)
def test_shards_that_the_nodes_have_lost_come_from_the_shared_tier_and_all_others_from_the_nodes(
    comm, shared_path, scheme, lost, missing
):
    cluster = Cluster(comm, shared_path, scheme, shared_every=1)
    cluster.save("abcd", 10)
    before = [shard(cluster.node(node), rank).read_bytes() for rank, node in enumerate("abcd")]
    cluster.lose(*lost)
    for rank in {*range(4)} - {*map(int, missing)}:  # of no use, and not needed
        on_one(comm, lambda rank=rank: flip(shard(shared_path / "shared", rank), 6000))
    assert cluster.restore("abcd") == 10
    assert cluster.named("restore")[0]["tier"] == "local"
    assert fetched(cluster) == {"shared": [f"rank{rank:0>5}.h5" for rank in missing]}
    assert [shard(cluster.node(node), rank).read_bytes() for rank, node in enumerate("abcd")] == before
    without_the_shared_tier(cluster, "d")


@FOUR
def test_without_redundancy_the_lost_shard_alone_comes_from_the_shared_tier(comm, shared_path, caplog):
    cluster = Cluster(comm, shared_path, "single", shared_every=1)
    cluster.save("abcd", 10)
    on_one(comm, lambda: flip(shard(cluster.node("b"), 1), 6000))
    cluster.lose("d")
    assert cluster.restore("abcd") == 10
    if comm.rank == 0:
        assert "going on with rank00001.h5, rank00003.h5 from the shared tier" in caplog.text
    assert fetched(cluster) == {"shared": ["rank00001.h5", "rank00003.h5"]}
    without_the_shared_tier(cluster, "")


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_the_copy_that_a_partner_still_has_is_nearer_than_the_shared_tier(comm, shared_path):
    """Each has the copy of the one before it: of a and b both are gone, and b's copy lies on c."""
    cluster = Cluster(comm, shared_path, "partner", shared_every=1)
    cluster.save("abc", 10)
    cluster.lose("a", "b")
    assert cluster.restore("abc") == 10
    assert fetched(cluster) == {"shared": ["rank00000.h5"]}
    assert cluster.named("rebuild")[-1]["rebuilt"] == ["rank00001.h5"]
    without_the_shared_tier(cluster, "b", "abc")


@FOUR
def test_what_the_shared_tier_has_damaged_comes_from_the_remote_one(comm, shared_path):
    url = f"file://{shared_path}/far"
    cluster = Cluster(comm, shared_path, shared_every=1, remote=url)
    cluster.save("abcd", 10)
    on_one(comm, lambda: flip(shard(shared_path / "shared", 2), 6000))
    cluster.lose("b", "c")
    assert cluster.restore("abcd") == 10
    assert fetched(cluster) == {"remote": ["rank00002.h5"], "shared": ["rank00001.h5"]}
    on_one(comm, lambda: shutil.rmtree(shared_path / "shared"))
    cluster.lose("a", "d")
    cluster.events.clear()
    assert cluster.restore("abcd") == 10
    assert fetched(cluster) == {"remote": ["rank00000.h5", "rank00003.h5"]}


@FOUR
def test_the_save_that_was_made_again_has_other_names_in_the_shared_tier(comm, shared_path):
    """Files of an overwritten step carry the save id; the next save on the nodes finds none beside it."""
    cluster = Cluster(comm, shared_path, shared_every=1)
    cluster.save("abcd", 10)
    on_one(comm, lambda: shutil.rmtree(shared_path / "nodes"))
    with cluster.open("abcd") as checkpointer:
        checkpointer.save(10, cluster.state(10), overwrite=True)
    there, here = (read_manifest(place / STEP).shards[1].path for place in (shared_path / "shared", cluster.node("a")))
    assert there != here
    cluster.lose("b", "c")
    assert cluster.restore("abcd") == 10
    assert fetched(cluster) == {"shared": ["rank00001.h5", "rank00002.h5"]}


@FOUR
def test_another_number_of_ranks_completes_a_step_too_and_protects_it(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=1)
    cluster.save("abcd", 10)
    cluster.lose("c", "d")
    with first_ranks(comm, 3) as few:
        for lost in ("", "a") if few else ():
            cluster.comm = few
            cluster.lose(*lost)
            assert restore_as(cluster, few, "abc") == 10
            assert fetched(cluster) == {"shared": ["rank00002.h5", "rank00003.h5"]}
            on_one(few, lambda: shutil.rmtree(shared_path / "shared", ignore_errors=True))
    cluster.comm = comm


def restore_as(cluster: Cluster, comm, of: str) -> int:
    """**Collective.** The step that these ranks find, of another number of ranks; its contents are what was saved."""
    with cluster.open(of, comm) as checkpointer:
        state = cluster.state(None, comm)
        state["own"] = PerRank(None, resize=lambda old, rank, size: sum(old))
        found = checkpointer.restore(state, world_size="any")
    assert np.array_equal(state["x"].array, cluster.state(found.step, comm)["x"].array), "other bits"
    assert state["own"].value == sum(10 * rank for rank in range(found.manifest.world_size))
    return found.step


# -- and when it cannot be completed -----------------------------------------------------------------------------------


@FOUR
def test_shards_of_another_save_of_the_step_are_never_mixed_in(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=1)
    cluster.save("abcd", 10)
    on_one(comm, lambda: shutil.copytree(shared_path / "shared", shared_path / "before"))
    with cluster.open("abcd") as checkpointer:
        checkpointer.save(10, cluster.state(11), overwrite=True)
    on_one(comm, lambda: shutil.rmtree(shared_path / "shared"))
    on_one(comm, lambda: (shared_path / "before").rename(shared_path / "shared"))
    cluster.lose("b", "c")
    with cluster.open("abcd") as checkpointer:
        state = cluster.state(None)
        assert checkpointer.restore(state, verify="none").step == 10
    assert np.array_equal(state["x"].array, cluster.state(10)["x"].array), "all of it as it was saved first"
    assert cluster.named("restore")[0]["tier"] == "shared"
    assert fetched(cluster) == {}


@FOUR
def test_a_node_without_room_for_what_is_missing_leaves_the_whole_step_to_the_shared_tier(
    comm, shared_path, monkeypatch, caplog
):
    cluster = Cluster(comm, shared_path, shared_every=1)
    cluster.save("abcd", 10)
    cluster.lose("b", "c")
    real = os.pwrite

    def pwrite(fd: int, data, offset: int) -> int:
        if comm.rank == 2 and os.readlink(f"/proc/self/fd/{fd}") == f"{shard(cluster.node('c'), 2)}.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        assert cluster.restore("abcd") == 10
    assert cluster.named("restore")[0]["tier"] == "shared"
    assert fetched(cluster) == {}
    if comm.rank == 0:
        assert "step 10 cannot be made whole on the nodes: OSError: [Errno 28]" in caplog.text
    assert not [*cluster.node("b").rglob("rank*")]
    cluster.save("abcd", 20)
    assert cluster.restore("abcd") == 20


@FOUR
def test_a_shard_that_no_tier_has_intact_is_an_error_on_every_rank(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=1)
    cluster.save("abcd", 10)
    cluster.lose("b", "c")
    on_one(comm, lambda: flip(shard(shared_path / "shared", 2), 6000))
    assert error_of(comm, CorruptShard, lambda: cluster.restore("abcd")).rank == 2


# -- whole, and protected anew -----------------------------------------------------------------------------------------


@FOUR
@pytest.mark.parametrize(("scheme", "parities"), [("xor", 4), ("rs:2+1", 4), ("rs:2+2", 1), ("partner", 1)])
def test_fewer_ranks_protect_what_they_restore_before_they_save(comm, shared_path, scheme, parities):
    """Rank 0 now looks after rank 3's files too: new groups, unless the old ones survive as much as any would."""
    cluster = Cluster(comm, shared_path, scheme)
    cluster.save("abcd", 10)
    cluster.lose("d")
    with first_ranks(comm, 3) as few:
        if few:
            assert restore_as(cluster, few, "abc") == 10
            assert len(cluster.named("rebuild")[-1]["encoded"]) == parities
            cluster.comm = few
            cluster.lose("a")
            assert restore_as(cluster, few, "abc") == 10
            assert not cluster.named("local_loss")
    cluster.comm = comm
    assert cluster.restore("abcd") == 10


@FOUR
def test_more_ranks_protect_what_they_restore_before_they_save(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with first_ranks(comm, 2) as few:
        if few:
            with cluster.open("aa", few) as checkpointer:
                checkpointer.save(10, cluster.state(10, few))
    assert restore_as(cluster, comm, "abcd") == 10
    cluster.lose("b")
    assert restore_as(cluster, comm, "abcd") == 10
    assert not cluster.named("local_loss")


@FOUR
def test_protecting_a_step_anew_that_lay_in_its_place_is_told(comm, shared_path):
    """A launch that could not write new redundancy leaves the step bare; the next one has nothing else to do."""
    cluster = Cluster(comm, shared_path, "partner")
    cluster.save("aabb", 10)
    assert cluster.restore("aabb") == 10
    assert not cluster.named("rebuild"), "nothing was to be done"

    def strip() -> None:
        for path in [*shared_path.rglob("*.redundancy.json"), *shared_path.rglob("*.parity")]:
            path.unlink()

    on_one(comm, strip)
    assert cluster.restore("aabb") == 10
    (told,) = cluster.named("rebuild")
    assert told["encoded"] == [f"rank{rank:05d}.parity" for rank in (0, 2, 1, 3)]
    assert told["moved"] == told["rebuilt"] == told["weak"] == []
    cluster.lose("a")
    assert cluster.restore("aabb") == 10
