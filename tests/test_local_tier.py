"""The node-local tier, directories for nodes: what a lost node held comes back bit for bit, or all ranks say why."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import time

import numpy as np
import pytest

from mpi_ckpt import Checkpointer, PerRank
from mpi_ckpt.errors import (
    CheckpointError,
    DirectoryInUse,
    MissingShard,
    SaveFailed,
    StepExists,
    UnusableOption,
)
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from tests.cluster import Cluster
from tests.launch import ROOT, Job, mpirun
from tests.ranks import contents, error_of, same_everywhere
from tests.tool_cases import verb
from tests.training import committed, events, same_end


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


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("async_io", [False, True])
def test_the_last_save_of_a_launch_that_ends_well_goes_to_the_shared_tier(comm, shared_path, async_io):
    cluster = Cluster(comm, shared_path, shared_every=3, remote=f"file://{shared_path}/far", async_io=async_io)
    with cluster.open("abcd", ends=True) as checkpointer:
        for step in (10, 20, 30, 40, 50):
            checkpointer.save(step, cluster.state(step), meta={"at": step})
    assert names.list_steps(shared_path / "shared") == [30, 50]
    assert names.list_steps(cluster.node("a")) == [40, 50]
    assert [event["tier"] for event in cluster.named("commit") if event["step"] == 50] == ["local", "shared"]
    near, far = read_manifest(cluster.node("a") / "step_00000050"), read_manifest(shared_path / "shared/step_00000050")
    assert far == near
    assert (far.meta, far.save_count) == ({"at": 50}, 5)
    for record in far.shards:
        assert hashlib.sha256((shared_path / "shared/step_00000050" / record.path).read_bytes()).hexdigest() == (
            record.sha256
        )
    assert (shared_path / "far/step_00000050/upload_manifest.json").exists()
    cluster.lose("a", "b", "c", "d")
    assert cluster.restore("abcd") == 50


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_what_a_launch_that_ends_well_has_gone_back_to_or_only_restored_goes_there_too(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    with cluster.open("ab", ends=True) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, cluster.state(step))
        assert checkpointer.discard_after(20) == [30]
    assert names.list_steps(shared_path / "shared") == [20]
    with cluster.open("ab") as checkpointer:
        checkpointer.save(40, cluster.state(40))
    with cluster.open("ab", ends=True) as checkpointer:
        pass  # looks at nothing, changes nothing
    assert names.list_steps(shared_path / "shared") == [20]
    with cluster.open("ab", ends=True) as checkpointer:
        assert checkpointer.restore(cluster.state(None)).step == 40
    assert names.list_steps(shared_path / "shared") == [20, 40]
    with cluster.open("ab", ends=True) as checkpointer:  # it is there already
        assert checkpointer.restore(cluster.state(None)).step == 40
    assert names.list_steps(shared_path / "shared") == [20, 40]
    cluster.lose("a", "b")
    assert cluster.restore("ab") == 40


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize(("scheme", "survives"), [("xor", True), ("single", False)])
def test_a_last_save_that_is_damaged_is_made_whole_first_or_an_error_on_every_rank(comm, shared_path, scheme, survives):
    cluster = Cluster(comm, shared_path, scheme)
    checkpointer = cluster.open("abcd", ends=True)
    checkpointer.save(10, cluster.state(10))
    if comm.rank == 1:
        path = cluster.node("b") / "step_00000010/rank00001.h5"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    if survives:
        checkpointer.close()
        assert cluster.named("rebuild")[0]["rebuilt"] == ["rank00001.h5"]
        cluster.lose("a", "b", "c", "d")
        assert cluster.restore("abcd") == 10
        return
    error = error_of(comm, MissingShard, checkpointer.close)
    assert "step 10 is on the nodes, but not in the shared tier" in str(error)
    same_everywhere(comm, str(error))
    assert not [path for path in (shared_path / "shared").rglob("*") if path.suffix in (".h5", ".tmp")]


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
@pytest.mark.parametrize("how", ["lost", "other names", "left out"])
def test_when_no_node_shows_what_the_nodes_had_it_is_said_and_nothing_begins_anew(comm, shared_path, how):
    cluster = Cluster(comm, shared_path)
    cluster.save("abcd", 10, 20)
    if how == "lost":
        cluster.lose("a", "b", "c", "d")
    options = {"local": None, "domain": None, "redundancy": None, "shared_every": None} if how == "left out" else {}
    of = "wxyz" if how == "other names" else "abcd"
    error = error_of(comm, MissingShard, lambda: cluster.restore(of, **options))
    assert "step 20 was saved on the nodes, and no node of this launch has anything of it" in str(error)
    assert "expected failure domains a, b, c, d" in str(error)
    same_everywhere(comm, str(error))
    cluster.save(of, 30, shared=True)
    cluster.save(of, 40, 50)
    if how == "lost":
        cluster.lose("a", "b", "c", "d")
    cluster.events.clear()
    again = "stuv" if how == "other names" else of
    assert cluster.restore(again, **options) == 30
    (loss,) = cluster.named("local_loss")
    assert loss["step"] == 50
    assert cluster.restore(again) == (50 if how == "left out" else 30)


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
    error = error_of(comm, UnusableOption, lambda: cluster.open("ab", local=f"{shared_path}/one"))
    assert "{domain}" in str(error)
    error = error_of(comm, UnusableOption, lambda: cluster.open("aa", local=f"{shared_path}/shared"))
    assert "the directory of the shared tier" in str(error)


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
@pytest.mark.parametrize(
    ("option", "missing"),
    [
        ({"redundancy": "xor"}, "local"),
        ({"local_keep": 2}, "local"),
        ({"shared_every": 10}, "local"),
        ({"domain": "a"}, "local"),
        ({"remote_keep": 2}, "remote"),
        ({"remote_bandwidth": 1e6}, "remote"),
    ],
    ids=str,
)
def test_an_option_of_a_tier_that_is_not_there_is_refused(comm, shared_path, option, missing):
    with pytest.raises(ValueError, match=f"{next(iter(option))}: found .* without `{missing}`"):
        Checkpointer(shared_path / "c", comm, **option)
    assert not (shared_path / "c").exists()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_protection_that_is_weaker_than_promised_is_said_once_a_launch_and_still_protects(comm, shared_path, caplog):
    cluster = Cluster(comm, shared_path, "rs:2+2")
    with caplog.at_level(logging.WARNING):
        cluster.save("aabb", 10, 20)
    assert caplog.text.count("1 of these may be lost at once, not 2") == (comm.rank == 0)
    (weak,) = cluster.named("weak_redundancy")
    assert weak == {"event": "weak_redundancy", "step": 10, "scheme": "rs:2+2", "tolerance": 1, "promised": 2}
    cluster.lose("b")
    assert cluster.restore("aabb") == 20
    assert cluster.named("rebuild")[-1]["weak"] == [(0, 1, 2, 3)]
    parity = cluster.node("a") / "step_00000020" / "rank00000.parity"
    before = parity.stat().st_mtime_ns
    assert cluster.restore("aabb") == 20
    assert parity.stat().st_mtime_ns == before, "no other groups would be stronger: nothing is coded again"
    assert cluster.restore("abcd") == 20
    assert cluster.named("rebuild")[-1]["weak"] == []
    cluster.save("abcd", 30)
    assert len(cluster.named("weak_redundancy")) == 1


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
@pytest.mark.parametrize(("nodes", "domains"), [("aaa", 1), ("aab", 2)])
def test_nodes_that_cannot_protect_each_other_go_on_unprotected_and_say_so_once(
    comm, shared_path, caplog, nodes, domains
):
    cluster = Cluster(comm, shared_path)
    with caplog.at_level(logging.WARNING):
        cluster.save(nodes, 10, 20)
    assert caplog.text.count("UNPROTECTED") == (comm.rank == 0)
    if comm.rank == 0:
        for said in ("xor cannot protect these ranks", f"of 3 ranks in 'a', {domains} domain", "over more nodes"):
            assert said in caplog.text
    (event,) = cluster.named("unprotected")
    assert event == {"event": "unprotected", "step": 10, "scheme": "xor", "domains": domains}
    assert not cluster.named("weak_redundancy")
    assert not [*cluster.path.rglob("*.parity")]
    assert cluster.restore(nodes) == 20
    cluster.save("abc", 30)  # enough nodes again: what is saved now is protected
    cluster.lose("b")
    assert cluster.restore("abc") == 30


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_what_was_saved_unprotected_is_protected_once_there_are_enough_nodes(comm, shared_path):
    cluster = Cluster(comm, shared_path)
    cluster.save("aaa", 10)
    assert cluster.restore("abc") == 10
    cluster.lose("b")
    assert cluster.restore("abc") == 10
    cluster.lose("a")
    assert cluster.restore("abc") == 10
    assert not cluster.named("local_loss")


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_protection_that_costs_more_than_promised_is_said_at_launch(comm, shared_path, caplog):
    """rs:4+2 on four nodes: groups of four with two parities, as many bytes again as the data have."""
    cluster = Cluster(comm, shared_path, "rs:4+2")
    with caplog.at_level(logging.WARNING):
        cluster.save("abcd", 10)
    said = "rs:4+2 on 4 failure domains", "2 of these may be lost at once", "100 % of the bytes of the data, not 50 %"
    assert [caplog.text.count(text) for text in said] == [int(comm.rank == 0)] * 3
    assert not cluster.named("weak_redundancy")
    sizes = {kind: sum(path.stat().st_size for path in shared_path.rglob(f"*.{kind}")) for kind in ("h5", "parity")}
    assert sizes["h5"] <= sizes["parity"] < 1.1 * sizes["h5"]
    cluster.lose("b", "d")
    assert cluster.restore("abcd") == 10


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


def test_the_readme_s_nodes_on_one_machine_work_as_they_are_written(launch):
    """Its lines, but for the place of the nodes."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (script,) = (block for block in blocks if "{rank}" in block)
    path = os.pathsep.join([os.path.dirname(mpirun()), os.path.dirname(sys.executable), os.environ["PATH"]])
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PATH": path, "PYTHONPATH": python_path}
    job = Job(["bash", "-ec", script.replace("/tmp/demo-nodes", "demo-nodes")], launch.cwd, env)
    try:
        outcome = job.wait().check()
    finally:
        job.end()
    assert "resumed runs/nodes after step 20 from the nodes; rebuilt rank00002.h5\n" in outcome.stdout
    assert committed(launch.cwd / "runs/nodes")[-1] == 30


def test_a_run_that_is_left_with_one_of_its_two_nodes_goes_on_there(launch):
    """Four ranks on two nodes; one is gone for good, and two ranks go on from what its parity gives back."""
    options = ("--local", "nodes/{domain}", "--run-dir", "run", "--ckpt-every", "2steps", "--no-async-io")
    died = launch.train(4, *options, "--steps", "12", "--inject", "kill:7:3", wrap=AS_NODES)
    assert died.status != 0
    shutil.rmtree(launch.cwd / "nodes" / "node1")
    alone = launch.train(2, *options, "--elastic", "--stop-at", "10", wrap=AS_NODES).check()
    assert alone.stderr.count("UNPROTECTED") == 1
    assert [event["step"] for event in events(launch.cwd / "run", "restore")] == [6]
    assert [event["step"] for event in events(launch.cwd / "run", "unprotected")] == [8]
    both = launch.train(4, *options, "--elastic", wrap=AS_NODES).check()
    assert "UNPROTECTED" not in both.stderr
    assert (launch.cwd / "nodes/node1/run/step_00000012/rank00003.parity").exists()


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
    again = launch.train(4, *nodes, wrap=AS_NODES).check()
    assert "resumed run after step 6 from the nodes; rebuilt rank00002.h5, rank00003.h5\n" in again.stdout
    assert events(launch.cwd / "run", "rebuild")[0]["rebuilt"] == ["rank00002.h5", "rank00003.h5"]
    assert [event["step"] for event in events(launch.cwd / "run", "restore")] == [6]
    same_end(launch.cwd / "whole", launch.cwd / "run", 8)
