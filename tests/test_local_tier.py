"""The node-local tier, directories for nodes: what a lost node held comes back bit for bit, or all ranks say why."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt import Checkpointer, PerRank, Shard, shard_range
from mpi_ckpt.errors import CheckpointError, DirectoryInUse, MissingShard, SaveFailed, StepExists
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from tests.ranks import contents, error_of, same_everywhere
from tests.tool_cases import verb
from tests.training import committed, events, same_end

ELEMENTS = 50_000


class Cluster:
    """A launch after the other on "nodes", directories below `path`: rank r runs in the failure domain of[r]."""

    def __init__(self, comm, path: Path, redundancy: str = "xor", **options) -> None:
        self.comm, self.path = comm, path
        self.options = {"redundancy": redundancy, "shared_every": 100, "async_io": False, "timeout": 20.0} | options
        self.events: list[dict] = []

    def open(self, of: str, comm=None, **options) -> Checkpointer:
        comm = comm or self.comm
        domain = of.split()[comm.rank] if " " in of else of[comm.rank]
        options = {"local": f"{self.path}/nodes/{{domain}}", "domain": domain} | self.options | options
        return Checkpointer(self.path / "shared", comm, on_event=self.events.append, **options)

    def state(self, step: int | None, comm=None) -> dict:
        """This rank's part at a step; NaN where it is to be restored."""
        comm = comm or self.comm
        start, stop = shard_range(ELEMENTS, comm.size, comm.rank)
        x = np.full(stop - start, np.nan) if step is None else np.arange(start, stop) * 1.5 + step
        return {"x": Shard(x, start, ELEMENTS), "step": step, "own": PerRank(comm.rank * 10 if step else None)}

    def save(self, of: str, *steps: int, **options) -> None:
        with self.open(of, **options) as checkpointer:
            for step in steps:
                checkpointer.save(step, self.state(step))

    def restore(self, of: str, step: int | None = None, **options) -> int | None:
        """**Collective.** The step that was found; its contents are what was saved."""
        with self.open(of, **options) as checkpointer:
            state = self.state(None)
            found = checkpointer.restore(state, step)
        if found is None:
            return None
        expected = self.state(found.step)
        assert np.array_equal(state["x"].array, expected["x"].array), "other bits"
        assert state["own"].value == expected["own"].value
        return found.step

    def lose(self, *nodes: str) -> None:
        self.comm.barrier()
        for node in nodes if self.comm.rank == 0 else ():
            shutil.rmtree(self.node(node))
        self.comm.barrier()

    def node(self, name: str) -> Path:
        return self.path / "nodes" / name

    def named(self, event: str) -> list[dict]:
        return [found for found in self.events if found["event"] == event]


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("scheme", ["xor", "partner", "rs:2+1"])
def test_a_lost_node_comes_back_bit_for_bit_without_the_shared_tier(comm, shared_path, scheme):
    cluster = Cluster(comm, shared_path, scheme)
    cluster.save("abcd", 10, 20)
    before = (cluster.node("c") / "step_00000020/rank00002.h5").read_bytes()
    cluster.lose("c")
    assert cluster.restore("abcd") == 20
    assert not names.list_steps(shared_path / "shared")
    assert (cluster.node("c") / "step_00000020/rank00002.h5").read_bytes() == before
    assert read_manifest(cluster.node("c") / "step_00000020").step == 20
    cluster.lose("a")  # whole again: as much as before may be lost
    assert cluster.restore("abcd") == 20
    assert [event["step"] for event in cluster.named("rebuild")] == [20, 20]
    assert cluster.named("rebuild")[0]["rebuilt"] == ["rank00002.h5"]


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("scheme", ["xor", "partner", "rs:2+1"])
def test_one_loss_more_is_told_to_every_rank_and_falls_back(comm, shared_path, scheme):
    cluster = Cluster(comm, shared_path, scheme, shared_every=2)
    cluster.save("abcd", 10, 20, 30)  # 20 lies in the shared tier too
    cluster.lose("a", "c")  # both of one group, even in pairs
    assert cluster.restore("abcd") == 20
    (loss,) = cluster.named("local_loss")[:1]
    assert loss["step"] == 30
    assert "more is lost than" in loss["error"]
    assert "rank" in loss["error"]
    same_everywhere(comm, loss["error"])
    assert cluster.restore("abcd") == 20  # the lost step does not come back into the count
    cluster.save("abcd", 30, 40)
    assert cluster.restore("abcd") == 40


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_more_loss_than_any_tier_covers_is_an_error_on_every_rank_and_no_fresh_start(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10, 20)
    cluster.lose("b", "c")
    error = error_of(comm, MissingShard, lambda: cluster.restore("abcd"))
    assert "domain b" in str(error) or "domain c" in str(error)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("scheme", ["rs:2+2", "partner"])
def test_two_neighbours_are_lost_at_once(comm, shared_path, scheme):
    cluster = Cluster(comm, shared_path, scheme)
    cluster.save("abcd", 10)
    cluster.lose("b", "c")
    assert cluster.restore("abcd") == 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_replacement_nodes_with_new_names_and_ranks_that_moved(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10)
    cluster.lose("b")
    assert cluster.restore("axcd") == 10
    assert cluster.restore("dcxa") == 10
    assert cluster.named("rebuild")[-1]["moved"]


@pytest.mark.mpi(ranks=[5], timeout=60, unit="s")
def test_uneven_ranks_a_node(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("aabbc", 10)
    cluster.lose("a")
    assert cluster.restore("aabbc") == 10
    cluster.lose("c")
    assert cluster.restore("aabbn") == 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_damaged_file_on_a_node_is_made_again(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10)
    if comm.rank == 0:
        path = cluster.node("b") / "step_00000010/rank00001.h5"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    comm.barrier()
    assert cluster.restore("abcd") == 10
    assert cluster.named("rebuild")[0]["rebuilt"] == ["rank00001.h5"]


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_overwriting_a_step_and_of_two_saves_the_later_wins(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with cluster.open("abcd") as checkpointer:
        checkpointer.save(10, cluster.state(11))
        error_of(comm, StepExists, lambda: checkpointer.save(10, cluster.state(10)))
        old = (cluster.node("a") / "step_00000010/manifest.json").read_bytes()
        files = {path.name: path.read_bytes() for path in (cluster.node("a") / "step_00000010").iterdir()}
        comm.barrier()
        checkpointer.save(10, cluster.state(10), overwrite=True)
    if comm.rank == 0:  # as a crash between the renames leaves it: one node has the old manifest, and the old files
        (cluster.node("a") / "step_00000010/manifest.json").write_bytes(old)
        for name, data in files.items():
            (cluster.node("a") / "step_00000010" / name).write_bytes(data)
    comm.barrier()
    assert cluster.restore("abcd") == 10
    assert not cluster.named("local_loss")
    left = {path.name for path in (cluster.node("a") / "step_00000010").iterdir()}
    assert len(left) == 4, left


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_retention_of_the_nodes_and_the_rhythm_of_the_shared_tier_over_restarts(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=3, keep=None)
    cluster.save("aabb", 1, 2)
    assert cluster.restore("aabb") == 2
    cluster.save("aabb", 3, 4)
    cluster.save("aabb", 5, 6, 7)
    assert names.list_steps(cluster.node("a")) == names.list_steps(cluster.node("b")) == [6, 7]
    assert names.list_steps(shared_path / "shared") == [3, 6]
    assert read_manifest(cluster.node("a") / "step_00000007").save_count == 7


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_step_saved_later_without_the_nodes_is_the_newer_one(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with cluster.open("ab") as checkpointer:
        checkpointer.save(10, cluster.state(11), shared=True)
    time.sleep(1.1)  # what manifests say of the time is in seconds
    with Checkpointer(shared_path / "shared", comm) as checkpointer:
        checkpointer.save(10, cluster.state(10), overwrite=True)
    assert cluster.restore("ab") == 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_discard_after_goes_for_the_nodes_too(comm, shared_path):
    cluster = Cluster(comm, shared_path, local_keep=5)
    with cluster.open("abcd") as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, cluster.state(step))
        assert checkpointer.discard_after(10) == [30, 20]
        assert checkpointer.all_steps() == [10]
    assert cluster.restore("abcd") == 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_step_is_read_by_another_number_of_ranks_on_other_nodes(comm, shared_path):
    cluster = Cluster(comm, shared_path, shared_every=100)
    cluster.save("abcd", 10)
    cluster.lose("d")
    few = comm.Split(0 if comm.rank < 3 else 1)
    if comm.rank < 3:
        with cluster.open("abc", few) as checkpointer:
            state = cluster.state(None, few)
            state["own"] = PerRank(None, resize=lambda old, rank, size: sum(old))
            assert checkpointer.restore(state, world_size="any").step == 10
            expected = cluster.state(10, few)
            assert np.array_equal(state["x"].array, expected["x"].array)
            assert state["own"].value == 60
            checkpointer.save(20, state | {"step": 20})
    comm.barrier()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_a_failing_disk_on_one_node_leaves_no_trace_on_any(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with cluster.open("abcd") as checkpointer:
        checkpointer.save(10, cluster.state(10))
        if comm.rank == 2:  # a directory where the manifest is to be staged: every file is written by then
            (cluster.node("c") / "step_00000020" / "manifest.json.tmp").mkdir(parents=True)
        comm.barrier()
        error = error_of(comm, SaveFailed, lambda: checkpointer.save(20, cluster.state(20)))
        assert error.rank == 2
        assert checkpointer.all_steps() == [10]
    left = [path for node in "abd" for path in cluster.node(node).rglob("step_00000020/*")]
    assert not left
    assert cluster.restore("abcd") == 10


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_orphans_and_shared_directories_are_refused(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with cluster.open("ab") as checkpointer:
        checkpointer.save(10, cluster.state(10))
        if comm.rank == 1:  # a successor has taken over one node
            (cluster.node("b") / "writer.lock").write_text('{"launch": "another"}')
        comm.barrier()
        error = error_of(comm, CheckpointError, lambda: checkpointer.save(20, cluster.state(20)))
        assert isinstance(error, DirectoryInUse)
    error = error_of(comm, DirectoryInUse, lambda: cluster.open("ab", local=f"{shared_path}/one"))
    assert "{domain}" in str(error)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_nodes_that_cannot_protect_each_other_are_refused_at_once(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    error = error_of(comm, CheckpointError, lambda: cluster.open("aa"))
    assert "failure domain" in str(error)
    cluster.save("aa", 10, redundancy="single")
    assert cluster.restore("aa", redundancy="single") == 10


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("committed", ["", "a", "bd", "abc"])
def test_killed_between_the_renames_of_the_manifests_a_step_is_whole_or_gone(comm, shared_path, committed):
    """What lies there when all are killed once the nodes `committed` have renamed theirs."""
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10, 20)
    if comm.rank == 0:
        for node in {*"abcd"} - {*committed}:
            manifest = cluster.node(node) / "step_00000020/manifest.json"
            manifest.rename(manifest.with_name("manifest.json.tmp"))
    comm.barrier()
    with cluster.open("abcd") as checkpointer:
        assert checkpointer.all_steps() == ([10, 20] if committed else [10])
    for node in "abcd":
        assert names.list_steps(cluster.node(node)) == names.list_steps(cluster.node("a"))
        assert not [*cluster.node(node).rglob("*.tmp")]
    assert cluster.restore("abcd") == (20 if committed else 10)


@pytest.mark.parametrize("kill", [[1, 2], [0, -2]])
def test_a_rank_that_is_killed_while_manifests_are_renamed(launch, tmp_path, kill):
    task = {"root": str(tmp_path / "shared"), "local": f"{tmp_path}/nodes/{{domain}}", "domains": [*"abcd"]}
    outcome = launch(4, "-m", "tests.programs.nodes", json.dumps(task | {"save": [10, 20], "kill": kill}))
    assert outcome.status != 0
    restart = launch(4, "-m", "tests.programs.nodes", json.dumps(task | {"restore": True, "save": [30]})).check()
    for found in json.loads(restart.stdout):
        assert found["error"] is None
        assert found["restored"] in ((10, 20) if kill[1] > 0 else (20,))
        assert found["steps"][-1] == 30


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_scavenge_brings_home_what_the_nodes_of_a_dead_job_hold(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10, 20)
    cluster.lose("c")
    if comm.rank == 0:
        nodes = [cluster.node(name) for name in "abd"]
        before = contents(shared_path / "nodes")
        said = verb("scavenge", "--local", *nodes, "--out", shared_path / "shared", "--json")
        assert (said.status, said.json["step"], said.json["rebuilt"]) == (0, 20, ["rank00002.h5"]), said
        assert contents(shared_path / "nodes") == before
        assert verb("verify", shared_path / "shared").status == 0
        assert verb("scavenge", "--local", *nodes, "--out", shared_path / "shared", "--json").json["copied"] == []
        lost = verb("scavenge", "--local", *nodes[:2], "--out", shared_path / "other")
        assert lost.status == 1
        assert "more is lost than xor" in lost.err
    comm.barrier()
    cluster.lose("a", "b", "d")
    assert cluster.restore("wxyz") == 20


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_repair_makes_a_step_whole_without_mpi(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("aabb", 10)
    before = contents(cluster.node("b"))
    cluster.lose("b")
    if comm.rank == 0:
        said = verb("repair", cluster.node("a"), cluster.node("b"), "--json")
        assert said.status == 0, said
        assert len(said.json["shards"]) == 2
        after = contents(cluster.node("b"))
        assert {name: data for name, data in after.items() if "step" in name} == {
            name: data for name, data in before.items() if "step" in name
        }
        assert "as it was" in verb("repair", cluster.node("a"), cluster.node("b")).out
    comm.barrier()
    cluster.lose("a")
    assert cluster.restore("aabb") == 10


@pytest.mark.parametrize("threads", ["multiple", "serialized"])
def test_asynchronous_saves_commit_on_nodes_and_beyond(launch, tmp_path, threads):
    """Where MPI lets no thread communicate too: then at the next call."""
    task = {"root": str(tmp_path / "shared"), "local": f"{tmp_path}/nodes/{{domain}}", "domains": [*"abcd"]}
    task |= {"options": {"shared_every": 2, "local_keep": 3}}
    env = {"MPI4PY_RC_THREAD_LEVEL": threads}
    saved = launch(4, "-m", "tests.programs.nodes", json.dumps(task | {"save": [10, 20, 30]}), env=env).check()
    commits = [event for event in json.loads(saved.stdout)[3]["events"] if event["event"] == "commit"]
    assert [(event["step"], event["tier"]) for event in commits] == [(10, "local"), (20, "shared"), (30, "local")]
    here, there = (contents(tmp_path / place / "step_00000020") for place in ("nodes/c", "shared"))
    assert here["rank00002.h5"] == there["rank00002.h5"]
    assert here["manifest.json"].splitlines()[1:3] == there["manifest.json"].splitlines()[1:3]
    shutil.rmtree(tmp_path / "nodes/c")
    restored = launch(4, "-m", "tests.programs.nodes", json.dumps(task | {"restore": True}), env=env).check()
    assert [found["restored"] for found in json.loads(restored.stdout)] == [30] * 4


AS_NODES = ("sh", "-c", 'MPI_CKPT_DOMAIN=node$((${PMI_RANK:-$OMPI_COMM_WORLD_RANK} / 2)) exec "$@"', "sh")


def test_a_run_that_loses_a_node_between_launches_continues_bit_identically(launch):
    """Four ranks on two nodes, killed in the middle; then a node's directory is gone, and no step is shared."""
    options = ("--steps", "8", "--ckpt-every", "2steps", "--no-async-io")
    launch.train(4, "--run-dir", "whole", *options).check()
    nodes = ("--local", "nodes/{domain}", "--run-dir", "run", *options)
    died = launch.train(4, *nodes, "--inject", "kill:7:3", wrap=AS_NODES)
    assert died.status != 0
    assert committed(launch.cwd / "run") == []
    shutil.rmtree(launch.cwd / "nodes" / "node1")
    launch.train(4, *nodes, wrap=AS_NODES).check()
    assert events(launch.cwd / "run", "rebuild")[0]["rebuilt"] == ["rank00002.h5", "rank00003.h5"]
    assert [event["step"] for event in events(launch.cwd / "run", "restore")] == [6]
    same_end(launch.cwd / "whole", launch.cwd / "run", 8)
