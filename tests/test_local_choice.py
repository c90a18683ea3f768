"""Which step a restart takes, and what it leaves alone, where the copies on the nodes do not agree or are damaged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mpi_ckpt.errors import CheckpointError, InvalidManifest, NoCheckpoint, SaveFailed
from mpi_ckpt.storage import atomic, names
from tests.cluster import Cluster
from tests.ranks import error_of


def flip(path: Path, byte: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)


def spoil(cluster: Cluster, *files: Path) -> None:
    """**Collective.** A bit of each is flipped."""
    cluster.comm.barrier()
    for file in files if cluster.comm.rank == 0 else ():
        flip(file)
    cluster.comm.barrier()


def manifest(cluster: Cluster, node: str, step: int) -> Path:
    return names.manifest_path(names.step_dir(cluster.node(node), step))


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_one_damaged_copy_of_a_manifest_counts_for_nothing(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("ab", 10)
    intact = manifest(cluster, "b", 10).read_bytes()
    spoil(cluster, manifest(cluster, "a", 10))
    assert cluster.restore("ab") == 10
    assert manifest(cluster, "a", 10).read_bytes() == intact


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_whose_every_manifest_is_damaged_is_no_fresh_start(comm, shared_path):
    cluster = Cluster(comm, shared_path, "single")
    cluster.save("aa", 10)
    spoil(cluster, manifest(cluster, "a", 10))
    error = error_of(comm, InvalidManifest, lambda: cluster.restore("aa"))
    assert "no tier has a step that can be restored" in str(error)
    assert error.path is not None
    assert error.path.endswith("step_00000010/manifest.json")


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_the_step_before_one_whose_every_manifest_is_damaged_is_taken_and_said(comm, shared_path):
    cluster = Cluster(comm, shared_path, "single")
    cluster.save("aa", 10, 20)
    spoil(cluster, manifest(cluster, "a", 20))
    assert cluster.restore("aa") == 10
    assert [event["step"] for event in cluster.named("local_loss")] == [20]
    cluster.save("aa", 20)  # its number is free again
    assert cluster.restore("aa") == 20


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_the_step_between_is_taken_when_the_newest_is_lost_on_the_nodes_and_damaged_beyond_them(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=2, local_keep=2)
    cluster.save("abcd", 5, 10, 20, 30)  # 10 and 30 lie in the shared tier too, 20 on the nodes alone
    if comm.rank == 0:
        for node in "bc":
            for file in (cluster.node(node) / "step_00000030").glob("rank*"):
                file.unlink()
    spoil(cluster, shared_path / "shared/step_00000030/rank00001.h5")
    error_of(comm, CheckpointError, lambda: cluster.restore("abcd"))
    with cluster.open("abcd") as checkpointer:
        found = checkpointer.restore(cluster.state(None), on_damage="older")
        assert found is not None
        assert found.step == 20
        assert checkpointer.all_steps() == [10, 20]
    assert [event["step"] for event in cluster.named("damage")] == [30]


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_that_is_in_no_tier_is_refused_with_what_all_tiers_have(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=3)
    cluster.save("ab", 10, 20, 30, 40)
    assert "found steps 30, 40" in str(error_of(comm, NoCheckpoint, lambda: cluster.restore("ab", 77)))


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_what_is_saved_after_going_back_stays_beside_the_later_steps(comm, shared_path, caplog):
    cluster = Cluster(comm, shared_path, local_keep=3)
    cluster.save("ab", 10, 20, 30)
    with cluster.open("ab", local_keep=2) as checkpointer:
        checkpointer.restore(cluster.state(None), 10)
        checkpointer.save(11, cluster.state(11))
        assert checkpointer.all_steps() == [11, 20, 30]
        checkpointer.save(12, cluster.state(12))
        assert checkpointer.all_steps() == [12, 20, 30]
    if comm.rank == 0:
        assert "step 11 is saved while step 30 is there" in caplog.text


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_that_one_node_cannot_discard_is_an_error_on_every_rank(comm, shared_path, monkeypatch):
    cluster = Cluster(comm, shared_path)
    cluster.save("ab", 10, 20)
    stuck = manifest(cluster, "b", 20)
    real = os.unlink

    def unlink(path, *arguments, **options):
        if Path(path) == stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", unlink)
    with cluster.open("ab") as checkpointer:
        error = error_of(comm, CheckpointError, lambda: checkpointer.discard_after(10))
    assert "step 20 cannot be deleted from every node" in str(error)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("what", ["rename", "read"])
def test_a_node_that_fails_when_manifests_are_replaced_fails_the_save_at_once_on_all(
    comm, shared_path, monkeypatch, what
):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10)
    before = {node: manifest(cluster, node, 10).read_bytes() for node in "abcd"}
    mine = manifest(cluster, "abcd"[comm.rank], 10)
    broken = OSError(errno.EIO, "Input/output error", str(mine))
    with cluster.open("abcd") as checkpointer:
        if comm.rank == 1 and what == "rename":
            real, once = atomic.publish, [broken]

            def publish(temporary, final):
                if Path(final) == mine and once:
                    raise once.pop()
                real(temporary, final)

            monkeypatch.setattr(atomic, "publish", publish)
        if comm.rank == 1 and what == "read":
            read_bytes = Path.read_bytes

            def read(path):
                if path == mine:
                    raise broken
                return read_bytes(path)

            monkeypatch.setattr(Path, "read_bytes", read)
        error = error_of(comm, SaveFailed, lambda: checkpointer.save(10, cluster.state(10), overwrite=True))
        monkeypatch.undo()
    assert (type(error), error.rank) == (SaveFailed, 1)
    comm.barrier()
    assert {node: manifest(cluster, node, 10).read_bytes() for node in "abcd"} == before
    assert cluster.restore("abcd") == 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_node_that_was_away_does_not_put_its_save_over_one_that_the_others_can_give_back(comm, shared_path, caplog):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10, 20, 30)  # of an attempt that is started anew, with fewer saves up to step 30
    if comm.rank == 0:
        (shared_path / "nodes/d").rename(shared_path / "away")
    cluster.lose("a", "b", "c")
    cluster.save("abcd", 30)
    kept = manifest(cluster, "a", 30).read_bytes()
    cluster.lose("d")
    if comm.rank == 0:
        (shared_path / "away").rename(shared_path / "nodes/d")
    comm.barrier()
    assert cluster.restore("abcd") == 30
    assert [manifest(cluster, node, 30).read_bytes() for node in "abcd"] == [kept] * 4
    assert not cluster.named("local_loss")
    assert "damaged" not in caplog.text, "what was whole, of another save"
    assert "which counts it as lost" in caplog.text or comm.rank == 3
