"""The verbs take the nodes' directories as the training command has them, and `scavenge` brings a whole run home."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from mpi_ckpt.storage.manifest import read_manifest, write_manifest
from tests.launch import Launcher
from tests.ranks import contents
from tests.tool_cases import program, save_on_nodes, verb
from tests.training import losses

NODES = {"MPI_CKPT_DOMAIN": "node{rank}"}
FLAGS = ("--local", "nodes/{domain}", "--ckpt-every", "5steps", "--redundancy", "xor", "--seed", "7")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run `demo` of the trainer on three nodes, steps 5 and 10 of which only they have; the working directory."""
    launch = Launcher(tmp_path_factory.mktemp("trained"))
    launch.train(3, "--run-dir", "demo", *FLAGS, "--steps", "12", "--stop-at", "10", env=NODES).check()
    shutil.rmtree(launch.cwd / "demo" / "checkpoints")  # what the end of a launch leaves there
    return launch.cwd


@pytest.fixture
def here(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "here")


# -- {domain}, and the name of the run ---------------------------------------------------------------------------------


def test_domain_stands_for_every_node(tmp_path):
    nodes = save_on_nodes(tmp_path, "aabc")
    (nodes / "a file").touch()
    every = nodes / "{domain}"
    for arguments in (["--local", every], [every]):
        assert [(e["step"], e["here"]) for e in verb("ls", *arguments, "--json").json] == [(10, 4), (20, 4)]
        assert [v["elsewhere"] for v in verb("verify", *arguments, "--json").json] == [[], []]
    said = verb("show", every, 10)
    assert [line for line in said.out.splitlines() if line.startswith("in ")] == [
        f"in {nodes / node / 'step_00000010'}" for node in "abc"
    ]
    assert verb("repair", nodes / "b", every).out == "step 20 is whole, as it was\n", "each is locked once"
    assert verb("scavenge", "--local", every, "--out", tmp_path / "out", "--json").json["step"] == 20


def test_domain_may_be_a_part_of_a_name_and_other_signs_stand_for_themselves(tmp_path):
    place = tmp_path / "[a]*?"
    nodes = save_on_nodes(place, "ab")
    for node in "ab":
        (nodes / node).rename(nodes / f"x-{node}.y")
    assert [e["here"] for e in verb("ls", "--local", nodes / "x-{domain}.y", "--json").json] == [2, 2]


@pytest.mark.parametrize("arguments", [["ls", "--local"], ["ls"], ["show"], ["verify", "--local"], ["repair"]])
def test_domain_that_stands_for_nothing_is_nothing_there_and_says_what_it_looked_for(tmp_path, arguments):
    said = verb(*arguments, tmp_path / "{domain}" / "demo")
    assert said.status == 3
    assert f"found no directory {tmp_path}/*/demo" in said.err


def test_the_trainer_s_own_local_will_do_where_the_run_is_known(here, tmp_path):
    local = here / "nodes" / "{domain}"
    shutil.copytree(here / "nodes/node0/demo", here / "nodes/node0/other")
    for out in ("demo", "demo/checkpoints"):
        assert verb("scavenge", "--local", local, "--out", tmp_path / out, "--json").json["step"] == 10
    for arguments in (["scavenge", "--out", tmp_path / "else", "--local"], ["repair"], ["ls", "--local"]):
        said = verb(*arguments, local)
        assert said.status == 3
        assert "found runs: demo, other" in said.err
    assert not (tmp_path / "else").exists()
    for name in ("ls", "verify"):
        for arguments in ([here / "demo", "--local", local], ["--local", local / "demo"]):
            assert [found["step"] for found in verb(name, *arguments, "--json").json] == [5, 10]


# -- scavenge ----------------------------------------------------------------------------------------------------------


def test_a_scavenged_run_goes_on_where_its_nodes_were(here, tmp_path):
    """Of a run that has lost its directory and a node."""
    before = (here / "demo" / "run.json").read_bytes()
    shutil.rmtree(here / "demo")
    shutil.rmtree(here / "nodes" / "node1")
    said = verb("scavenge", "--local", here / "nodes/{domain}", "--out", here / "demo")
    assert said.status == 0, said
    assert "3 shards" not in said.out
    assert "2 shards copied, 1 made again" in said.out
    assert f"run.json of the run is in {here / 'demo'}" in said.out
    assert (here / "demo" / "run.json").read_bytes() == before
    shutil.rmtree(here / "nodes")
    launch = Launcher(here)
    assert "after step 10" in launch.train(3, "--run-dir", "demo", "--steps", "14").check().stdout
    launch.train(3, "--run-dir", "whole", "--seed", "7", "--steps", "12", "--stop-at", "10").check()
    launch.train(3, "--run-dir", "whole", "--steps", "14").check()
    assert losses(here / "demo") == {step: loss for step, loss in losses(here / "whole").items() if step > 10}


def test_a_run_file_that_is_there_stays_and_beside_bare_checkpoints_none_is_put(here, tmp_path):
    run_file = json.loads((here / "demo" / "run.json").read_text()) | {"steps": 99}
    (here / "demo" / "run.json").write_text(json.dumps(run_file))
    said = verb("scavenge", "--local", here / "nodes/{domain}", "--out", here / "demo", "--json")
    assert (said.status, said.json["run_file"]) == (0, None)
    assert json.loads((here / "demo" / "run.json").read_text()) == run_file
    assert verb("scavenge", "--local", here / "nodes/{domain}/demo", "--out", tmp_path / "checkpoints").status == 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000010", "writer.lock"]


def test_of_the_nodes_copies_of_the_run_file_that_beside_the_newest_step_counts(here, tmp_path):
    old = here / "nodes" / "node0" / "demo"
    shutil.rmtree(old / "step_00000010")
    (old / "run.json").write_text(json.dumps(json.loads((old / "run.json").read_text()) | {"steps": 7}))
    (here / "nodes" / "node1" / "demo" / "run.json").write_text("{")  # counts for nothing
    assert verb("scavenge", "--local", here / "nodes/{domain}/demo", "--out", tmp_path / "out").status == 0
    assert json.loads((tmp_path / "out" / "run.json").read_text())["steps"] == 12


def of_another_seed(path):
    document = json.loads(path.read_text())
    document["settings"]["seed"] += 1
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("out", ["demo", "demo/checkpoints"])
@pytest.mark.parametrize("where", ["demo/run.json", "nodes/node1/demo/run.json"])
def test_steps_of_another_run_are_refused(here, where, out):
    of_another_seed(here / where)
    before = contents(here)
    said = verb("scavenge", "--local", here / "nodes/{domain}", "--out", here / out)
    assert said.status == 2
    assert "the nodes hold another run's steps" in said.err
    assert str(here / where) in said.err
    assert contents(here) == before


@pytest.mark.parametrize("out", ["demo", "demo/checkpoints"])
@pytest.mark.parametrize("there", ["run.json", "steps alone"])
@pytest.mark.parametrize("copies", ["none", "empty"])
def test_nodes_without_a_run_file_are_known_by_their_steps(here, caplog, out, there, copies):
    for path in (here / "nodes").glob("*/demo/run.json"):
        path.write_bytes(b"") if copies == "empty" else path.unlink()
    if there == "run.json":
        of_another_seed(here / "demo" / "run.json")
        place = here / "demo" / "run.json"
    else:
        place = here / "demo" / "checkpoints" / "step_00000005"
        local = here / "nodes/{domain}/demo"
        assert verb("scavenge", "--local", local, "--out", place.parent, "--step", 5).status == 0
        (here / "demo" / "run.json").unlink()
        manifest = read_manifest(place)
        meta = manifest.meta | {"settings": manifest.meta["settings"] | {"seed": 8}}
        write_manifest(place, replace(manifest, meta=meta))
    before, _ = contents(here), caplog.clear()
    said = verb("scavenge", "--local", here / "nodes/{domain}", "--out", here / out)
    assert said.status == 2, said
    assert f"step 10 is another run's (file {here / 'nodes/node0/demo/step_00000010'})" in said.err
    assert f"found seed 7; expected seed 8, as {place} says" in said.err
    assert contents(here) == before
    assert len(caplog.messages) == (3 if copies == "empty" else 0)


@pytest.mark.parametrize("out", ["demo", "demo/checkpoints"])
def test_a_run_whose_own_file_is_cut_is_told_of_the_nodes_copies(here, out):
    (here / "demo" / "run.json").write_bytes(b"")
    before = contents(here)
    said = verb("scavenge", "--local", here / "nodes/{domain}", "--out", here / out)
    assert said.status == 2
    assert f"the settings of the run cannot be read (file {here / 'demo/run.json'}); found no bytes" in said.err
    assert f"Copy {here / 'nodes/node0/demo/run.json'} into its place." in said.err
    assert contents(here) == before


def test_a_step_that_is_lost_is_told_of_once(here, tmp_path):
    for node in ("node0", "node1"):
        shutil.rmtree(here / "nodes" / node / "demo" / "step_00000010")
    call = ["scavenge", "--local", here / "nodes/{domain}", "--out", tmp_path / "demo"]
    ended = program(*call)
    assert ended.returncode == 0, ended
    assert (ended.stdout + ended.stderr).count("more is lost than xor gives back") == 1
    assert ended.stdout.startswith("step 10 is lost: more is lost than xor gives back")
    for node in ("node0", "node1"):
        shutil.rmtree(here / "nodes" / node / "demo" / "step_00000005")
    ended = program(*call)
    assert ended.returncode == 1
    assert (ended.stdout + ended.stderr).count("more is lost than xor gives back") == 1
    assert "steps 5, 10 cannot be had from the nodes; of step 10: more is lost" in ended.stderr
