"""`ls`, `show`, `verify` and `repair` on the nodes' own directories: what lies there, and what is wrong with it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import flip
from tests.ranks import contents
from tests.tool_cases import save_on_nodes, verb


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Ranks 0 and 1 on node a, 2 on b, 3 on c."""
    return save_on_nodes(tmp_path_factory.mktemp("uneven"), "aabc")


@pytest.fixture(scope="module")
def abcd(tmp_path_factory):
    return save_on_nodes(tmp_path_factory.mktemp("abcd"), "abcd")


@pytest.fixture
def nodes(uneven, tmp_path):
    return shutil.copytree(uneven, tmp_path / "nodes")


def test_ls_says_what_lies_on_a_node(nodes):
    a, b = nodes / "a", nodes / "b"
    assert verb("pin", a, 20).status == 0
    (b / "step_00000010" / "manifest.json").rename(b / "step_00000010" / "manifest.damaged.json")
    listed = verb("ls", a, "--json").json
    assert [(e["step"], e["state"], e["ranks"], e["here"]) for e in listed] == [
        (10, "committed", 4, 2),
        (20, "pinned", 4, 2),
    ]
    assert listed[0]["nbytes"] == sum(path.stat().st_size for path in (a / "step_00000010").iterdir())
    assert [line.split()[1:4] for line in verb("ls", a).out.splitlines()[1:]] == [["2", "of", "4"]] * 2
    assert [(e["state"], e["here"]) for e in verb("ls", b, "--json").json] == [("set aside", 1), ("committed", 1)]
    both = verb("ls", "--local", a, b, "--json").json
    assert [(e["state"], e["here"]) for e in both] == [("committed", 3), ("pinned", 3)]
    assert both[0]["nbytes"] == listed[0]["nbytes"] + verb("ls", b, "--json").json[0]["nbytes"]


def test_show_says_what_lies_on_a_node_and_who_protects_it(nodes):
    *_, table = verb("show", nodes / "a", 10).out.split("on this node\n")
    header, first, second = (line.split() for line in table.splitlines())
    assert header == ["rank", "shard", "parity", "scheme", "survives", "group"]
    assert [first[0], second[0]] == ["0", "1"]
    assert "xor" in first
    assert "not" not in first
    assert verb("show", nodes / "a", "--json").json["step"] == 20
    assert "on this node" not in verb("show", nodes / "a", 10, "--json").out


def test_groups_that_survive_less_than_promised_say_so_and_are_repaired_all_the_same(tmp_path):
    nodes = save_on_nodes(tmp_path, "aabb", "rs:2+2")  # two members of the one group on each node
    assert "rs:2+2  1 lost, not 2  0, 1, 2, 3" in verb("show", nodes / "a").out
    before = contents(nodes / "b" / "step_00000020")
    shutil.rmtree(nodes / "b")
    said = verb("repair", nodes / "a", nodes / "b", "--json")
    assert said.status == 0, said
    assert len(said.json["shards"]) == 2
    assert contents(nodes / "b" / "step_00000020") == before


@pytest.mark.parametrize("quick", [(), ("--quick",)])
def test_what_lies_on_other_nodes_is_no_damage(nodes, quick):
    a, b, c = (nodes / name for name in "abc")
    before = contents(nodes)
    for arguments, elsewhere in (([b], [0, 1, 3]), (["--local", a, c], [2]), (["--local", a, b, c], [])):
        said = verb("verify", *arguments, "--json", *quick)
        assert said.status == 0, said
        found = [(v["step"], v["intact"], v["elsewhere"]) for v in said.json]
        assert found == [(10, True, elsewhere), (20, True, elsewhere)]
    assert "on other nodes, or lost: what ranks 0, 1, 3 saved" in verb("verify", b, "--step", 10, *quick).out
    assert contents(nodes) == before


def test_without_redundancy_too_a_node_is_known_as_one(tmp_path):
    nodes = save_on_nodes(tmp_path, "ab", "single")
    assert [(v["intact"], v["elsewhere"]) for v in verb("verify", nodes / "a", "--json").json] == [(True, [1])] * 2
    (nodes / "a" / "step_00000020" / "rank00000.h5").unlink()
    said = verb("verify", nodes / "a", "--step", 20)
    assert said.status == 1
    assert "rank00000.h5" in said.out


@pytest.mark.parametrize(
    ("damage", "kind", "name"),
    [
        ("flip", "CorruptShard", "rank00002.h5"),
        ("flip", "CorruptShard", "rank00002.parity"),
        ("flip", "InvalidManifest", "rank00002.redundancy.json"),
        ("flip", "InvalidManifest", "manifest.json"),
        ("cut", "CorruptShard", "rank00002.h5"),
        ("cut", "CorruptShard", "rank00002.parity"),
        ("remove", "MissingShard", "rank00002.h5"),
        ("remove", "MissingShard", "rank00002.parity"),
        ("remove", "MissingShard", "rank00002.redundancy.json"),
    ],
)
def test_each_damaged_file_of_a_node_is_named_and_repaired(nodes, damage, kind, name):
    local = [nodes / node for node in "abc"]
    path = nodes / "b" / "step_00000020" / name
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        flip(path, path.stat().st_size // 2)
    said = verb("verify", "--local", *local, "--json")
    assert said.status == 1, said
    intact, damaged = said.json
    assert intact["intact"]
    (fault,) = damaged["faults"]
    assert (fault["kind"], fault["path"]) == (kind, str(path))
    assert fault["rank"] == (2 if kind != "InvalidManifest" else None)
    assert verb("verify", nodes / "b").status == 1
    assert verb("verify", nodes / "c").status == 0, "what lies there is whole"
    assert intact["advice"] is None
    (command,) = re.findall("`python -m mpi_ckpt (.*)`", verb("verify", "--local", *local).out)
    assert command == f"repair {' '.join(map(str, local))} --step 20"
    assert verb(*command.split()).status == 0
    assert verb("verify", "--local", *local).status == 0


def test_one_node_s_damage_is_repaired_with_the_directories_of_the_others(nodes):
    flip(nodes / "b" / "step_00000010" / "rank00002.h5", 5000)
    said = verb("verify", nodes / "b", "--step", 10)
    assert f"`python -m mpi_ckpt repair {nodes / 'b'} DIR ... --step 10` (DIR ... are those of the other no" in said.out
    assert "--on-damage" not in said.out, "the advice of a step in one place"
    for path in nodes.glob("*/step_00000010/manifest.json"):
        flip(path, 100)
    assert "name the other nodes' directories, too" in verb("verify", "--local", nodes / "a", nodes / "b").out


def test_a_copy_of_another_rank_s_shard_that_was_fetched_is_checked_as_well(nodes):
    copy = nodes / "c" / "step_00000020" / "rank00000.h5"
    shutil.copy(nodes / "a" / "step_00000020" / "rank00000.h5", copy)
    said = verb("verify", nodes / "c", "--step", 20, "--json")
    assert said.json[0]["elsewhere"] == [1, 2]
    assert said.status == 0
    flip(copy, 5000)
    assert verb("verify", nodes / "c", "--step", 20).status == 1


def test_a_descriptor_of_another_save_is_damage(nodes):
    path = nodes / "b" / "step_00000020" / "rank00002.redundancy.json"
    shutil.copy(nodes / "b" / "step_00000010" / path.name, path)
    (fault,) = verb("verify", nodes / "b", "--step", 20, "--json").json[0]["faults"]
    assert (fault["kind"], fault["path"], fault["rank"]) == ("InvalidManifest", str(path), 2)
    old, new = (json.loads((nodes / "b" / f"step_000000{step}" / "manifest.json").read_text()) for step in (10, 20))
    for said, manifest in ((fault["found"], old), (fault["expected"], new)):
        assert said.startswith(
            f"rank 2 of save {manifest['save_id']}, {manifest['shards'][2]['nbytes']} bytes, sha256 "
        )


def test_nodes_that_hold_nothing_are_nothing_there(nodes, tmp_path):
    for arguments in (["ls", "--local"], ["verify", "--local"]):
        said = verb(*arguments, tmp_path / "x", tmp_path / "y")
        assert said.status == 3
        assert "the nodes hold no committed step" in said.err
    said = verb("verify", "--local", nodes / "a", "--step", 30)
    assert said.status == 3
    assert "the nodes do not hold step 30" in said.err


def test_a_damaged_shard_without_a_descriptor_is_made_again(nodes, tmp_path):
    step = nodes / "b" / "step_00000020"
    before = (step / "rank00002.h5").read_bytes()
    flip(step / "rank00002.h5", 6000)
    (step / "rank00002.redundancy.json").unlink()
    local = [nodes / node for node in "abc"]
    home = verb("scavenge", "--local", *local, "--out", tmp_path / "home", "--json")
    assert (home.status, home.json["step"], home.json["rebuilt"]) == (0, 20, ["rank00002.h5"]), home
    assert (tmp_path / "home/step_00000020/rank00002.h5").read_bytes() == before
    said = verb("repair", *local, "--json")
    assert (said.status, said.json["shards"]) == (0, [str(step / "rank00002.h5")]), said
    assert (step / "rank00002.h5").read_bytes() == before
    assert verb("verify", "--local", *local).status == 0


def test_a_descriptor_is_made_again_beside_its_shard(nodes, tmp_path):
    path = nodes / "b" / "step_00000020" / "rank00002.redundancy.json"
    before = path.read_text()
    path.unlink()
    said = verb("repair", tmp_path / "new", *(nodes / node for node in "abc"), "--json")
    assert said.status == 0, said
    assert path.read_text() == before
    assert [each.name for each in (tmp_path / "new/step_00000020").iterdir()] == ["manifest.json"]


@pytest.fixture(scope="module")
def two_launches(tmp_path_factory):
    """Step 20 of a launch on nodes a, b and c; and on node d what another, with more saves before, has left of it."""
    here = tmp_path_factory.mktemp("two")
    nodes = save_on_nodes(here / "new", "abcd", steps=(20,), seed=1)
    shutil.move(nodes / "d", here / "lost")
    shutil.move(save_on_nodes(here / "old", "abcd", steps=(5, 10, 20)) / "d", nodes / "d")
    return nodes, here / "lost"


@pytest.mark.parametrize("order", ["abcd", "dabc"])
def test_the_latest_save_that_can_be_had_counts_not_the_latest(two_launches, tmp_path, order):
    nodes, lost = shutil.copytree(two_launches[0], tmp_path / "nodes"), contents(two_launches[1] / "step_00000020")
    local = [nodes / node for node in order]
    said = verb("verify", "--local", *local, "--step", 20, "--json")
    assert said.status == 1
    assert {Path(fault["path"]).parent.parent for fault in said.json[0]["faults"]} == {nodes / "d"}
    home = verb("scavenge", "--local", *local, "--out", tmp_path / "home", "--json")
    assert (home.status, home.json["step"], home.json["rebuilt"]) == (0, 20, ["rank00003.h5"]), home
    before = [contents(nodes / node / "step_00000020") for node in order]
    said = verb("repair", *local, "--step", 20)
    assert said.status == 1
    assert "too little is left of the latest save of step 20, though an earlier one can be had" in said.err
    assert [contents(nodes / node / "step_00000020") for node in order] == before, "something's only copy is gone"
    local = [tmp_path / "e", *(nodes / node for node in "abc")]
    said = verb("repair", *local, "--step", 20)
    assert said.status == 0, said
    assert contents(tmp_path / "e" / "step_00000020") == lost
    assert verb("verify", "--local", *local, "--step", 20).status == 0


def test_of_two_saves_that_can_be_had_the_latest_counts(two_launches, tmp_path):
    nodes = shutil.copytree(two_launches[0], tmp_path / "nodes")
    old = two_launches[0].parent.parent / "old" / "nodes"
    local = [*(old / node for node in "abc"), nodes / "a", nodes / "b", nodes / "c", nodes / "d"]
    home = verb("scavenge", "--local", *local, "--out", tmp_path / "home", "--json")
    assert (home.json["step"], home.json["rebuilt"]) == (20, [])
    assert verb("diff", tmp_path / "home", tmp_path / "home").status == 0
    newest = json.loads((tmp_path / "home/step_00000020/manifest.json").read_text())
    assert newest["save_count"] == 3


def test_a_parity_file_of_another_save_is_not_taken_for_the_one_of_the_same_name(two_launches, tmp_path):
    nodes = shutil.copytree(two_launches[0], tmp_path / "nodes")
    shutil.copytree(two_launches[1], nodes / "e")  # its place was taken, and d is back with what it had
    (nodes / "a" / "step_00000020" / "rank00000.h5").unlink()
    local = [nodes / node for node in "dabce"]
    before = (two_launches[0] / "a/step_00000020/rank00000.h5").read_bytes()
    home = verb("scavenge", "--local", *local, "--out", tmp_path / "home", "--json")
    assert (home.status, home.json["rebuilt"]) == (0, ["rank00000.h5"])
    assert (tmp_path / "home/step_00000020/rank00000.h5").read_bytes() == before


def test_a_node_that_was_left_out_makes_a_step_weaker_and_that_is_said(abcd, tmp_path):
    nodes = shutil.copytree(abcd, tmp_path / "nodes")
    shutil.move(nodes / "d", tmp_path / "d")
    a, b, c = (nodes / node for node in "abc")
    said = verb("repair", a, b, c)
    assert said.status == 0
    assert f"2 (0, 3) now lie in {a / 'step_00000020'}: its loss would be more than can be given back" in said.out
    assert "step 20 is whole" in said.out
    assert "an empty one will do" in said.out
    shutil.copytree(a, tmp_path / "a")
    shutil.rmtree(a)
    assert "more is lost than xor gives back" in verb("repair", b, c).err
    shutil.move(tmp_path / "d", nodes / "d")
    assert verb("repair", b, c, nodes / "d", a, "--json").json["weak"] == []
    shutil.rmtree(a)
    shutil.move(tmp_path / "a", a)
    said = verb("repair", a, b, c, nodes / "d")
    assert said.out == "step 20 is whole, as it was\n", "its own node has what lies on another's too"


@pytest.mark.parametrize(("lost", "piled"), [("d", "abc"), ("a", "bcd")])
def test_what_a_repair_had_to_put_elsewhere_comes_to_a_directory_of_its_own(abcd, tmp_path, lost, piled):
    nodes = shutil.copytree(abcd, tmp_path / "nodes")
    before = contents(nodes / lost / "step_00000020")
    shutil.rmtree(nodes / lost)
    others = [nodes / node for node in piled]
    assert len(verb("repair", *others, "--json").json["weak"]) == 1
    here = contents(nodes)
    for new in (nodes / lost, tmp_path / "new"):
        said = verb("repair", *others, new, "--json")
        assert said.json["weak"] == []
        assert sorted(Path(path).name[:10] for path in said.json["copied"]) == [f"rank0000{'abcd'.index(lost)}."] * 2
        assert said.json["shards"] == []
        assert contents(new / "step_00000020") == before
        assert "as it was" in verb("repair", *others, new).out
        shutil.move(new, tmp_path / f"as {new.name}")
        assert contents(nodes) == here, "nothing else is changed"
    shutil.rmtree(others[0])
    assert verb("repair", *others, tmp_path / "as new").status == 0


def test_a_node_that_is_back_has_its_own_files_whatever_the_directories_are_called(abcd, tmp_path):
    first, *others = (shutil.copytree(abcd / node, tmp_path / f"copy {node}") for node in "abcd")
    shutil.move(first, tmp_path / "away")
    assert verb("repair", *others).status == 0
    shutil.move(tmp_path / "away", first)
    assert verb("repair", *others, first).out == "step 20 is whole, as it was\n"


def test_redundancy_that_is_lost_altogether_is_said(tmp_path):
    nodes = save_on_nodes(tmp_path, "ab", "partner")
    for path in nodes.glob("*/step_00000020/rank*.redundancy.json"):
        path.unlink()
    assert verb("repair", nodes / "a", nodes / "b", "--json").json["weak"] == [
        "ranks 0, 1 have lost their redundancy, and a restore protects them anew"
    ]


def test_the_directory_of_several_runs_is_told_from_that_of_one(nodes, tmp_path):
    local = tmp_path / "n"
    for node in "ab":
        for run in ("demo", "d") if node == "a" else ("demo",):
            shutil.copytree(nodes / node, local / node / run)
    for arguments in (
        ["ls", "--local", local / "a", local / "b"],
        ["verify", "--local", local / "a", local / "b"],
        ["repair", local / "a", local / "b"],
        ["scavenge", "--out", tmp_path / "out", "--local", local / "a", local / "b"],
        ["ls", local / "a"],
    ):
        said = verb(*arguments)
        assert said.status == 3, arguments
        assert "found runs: d, demo" in said.err
        assert f"Name {local / 'a' / 'd'}" in said.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["diff", "export", "reshard", "view", "push", "prune"])
def test_verbs_that_want_whole_steps_refuse_a_part_of_one(nodes, tmp_path, name):
    a, before = nodes / "a", contents(nodes)
    more = {
        "diff": [f"{a}:10"],
        "export": ["--out", tmp_path / "out"],
        "reshard": ["--ranks", 2, "--out", tmp_path / "out"],
        "view": ["--out", tmp_path / "out"],
        "push": ["--remote", f"file://{tmp_path}/out"],
        "prune": ["--keep", 1],
    }
    said = verb(name, a, *more[name])
    assert said.status == 1
    assert "a node's own directory" in said.err
    assert not (tmp_path / "out").exists()
    assert contents(nodes) == before
