"""A step that is damaged in the shared directory: `verify` says what helps, and `pull` and `scavenge` bring it back."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from tests.checkpoints import flip, manifest_of, shard_file, step_dir, write_manifest
from tests.launch import HANG, ROOT
from tests.ranks import contents
from tests.tool_cases import copy_of_run, save_on_nodes, verb

KILLED = """
import os, signal, sys
from mpi_ckpt import cli
rename, left = os.rename, int(sys.argv[1])
def rename_or_die(*paths):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
os.rename = rename_or_die
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


@pytest.fixture
def root(run):
    return run / "checkpoints"


@pytest.fixture
def url(run, tmp_path):
    """A remote tier with step 30."""
    url = f"file://{tmp_path}/remote"
    assert verb("push", run, "--remote", url).status == 0
    return url


def damage(root, step: int) -> int:
    """Flip a byte of rank 1's shard and remove rank 3's; the bytes of both, as they were."""
    nbytes = sum(shard_file(root, step, rank).stat().st_size for rank in (1, 3))
    flip(shard_file(root, step, 1), 5000)
    shard_file(root, step, 3).unlink()
    return nbytes


# -- pull ------------------------------------------------------------------------------------------------------------


def test_pull_fetches_what_is_damaged_or_missing_of_a_committed_step_and_nothing_else(run, root, url):
    verb("pin", run, 30)
    before, kept = contents(step_dir(root, 30)), shard_file(root, 30, 0).stat()
    nbytes = damage(root, 30)
    said = verb("pull", run, "--remote", url, "--step", 30, "--json")
    assert (said.status, said.json["fetched_nbytes"]) == (0, nbytes)
    assert contents(step_dir(root, 30)) == before
    assert os.path.samestat(shard_file(root, 30, 0).stat(), kept)
    assert "nothing fetched" in verb("pull", run, "--remote", url).out


def test_pull_brings_a_step_back_whose_manifest_is_damaged(run, root, url):
    before = contents(step_dir(root, 30))
    flip(step_dir(root, 30) / "manifest.json", 300)
    assert verb("pull", run, "--remote", url).status == 0
    assert contents(step_dir(root, 30)) == before


def test_a_manifest_of_a_newer_version_is_not_written_over(run, root, url):
    document = manifest_of(root, 30)
    document["schema_version"] += 1
    write_manifest(root, 30, document)
    before = contents(step_dir(root, 30))
    said = verb("pull", run, "--remote", url)
    assert said.status == 1
    assert "schema_version" in said.err
    assert contents(step_dir(root, 30)) == before
    assert verb("verify", run, "--step", 30, "--json").json[0]["advice"] is None


def test_a_pull_that_fails_leaves_a_damaged_step_as_it_was(run, root, url, tmp_path):
    (stored,) = (tmp_path / "remote").rglob("rank00003.h5")
    flip(stored, 100)
    damage(root, 30)
    before = contents(step_dir(root, 30))
    said = verb("pull", run, "--remote", url)
    assert said.status == 1
    assert str(stored) in said.err
    assert contents(step_dir(root, 30)) == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_pull_that_is_killed_while_it_mends_is_taken_up_by_the_next(run, root, url, renames):
    before = contents(step_dir(root, 30))
    damage(root, 30)
    arguments = [sys.executable, "-c", KILLED, str(renames), "pull", str(run), "--remote", url]
    killed = subprocess.run(arguments, cwd=ROOT, timeout=HANG, check=False)
    assert killed.returncode == -signal.SIGKILL
    (verdict,) = verb("verify", run, "--step", 30, "--json").json
    assert len(verdict["faults"]) == 2 - renames, "the step is committed all the while"
    assert verb("pull", run, "--remote", url).status == 0
    assert verb("verify", run, "--step", 30).status == 0
    if renames < 2:  # else no shard was wanted any more, and the next launch tidies up
        assert contents(step_dir(root, 30)) == before


# -- scavenge --------------------------------------------------------------------------------------------------------


def test_scavenge_brings_what_is_damaged_or_missing_of_a_committed_step(tmp_path):
    nodes, out = save_on_nodes(tmp_path, "abcd"), tmp_path / "out"
    scavenged = ("scavenge", "--local", nodes / "{domain}", "--out", out)
    assert verb(*scavenged).status == 0
    before = contents(step_dir(out, 20))
    damage(out, 20)
    shutil.rmtree(nodes / "d")  # rank 3's shard comes from parity
    said = verb(*scavenged, "--json")
    assert said.status == 0, said
    assert (said.json["copied"], said.json["rebuilt"]) == (["rank00001.h5"], ["rank00003.h5"])
    assert contents(step_dir(out, 20)) == before
    assert "0 shards copied, 0 made again" in verb(*scavenged).out


# -- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["run", "root"])
def test_the_command_that_verify_names_brings_the_step_back(run, root, url, place):
    damage(root, 30)
    said = verb("verify", {"run": run, "root": root}[place])
    assert said.status == 1
    advice = said.out.splitlines()[-1].split("`")
    assert f"--out {run} --step 30" in advice[3]
    words = shlex.split(advice[1].replace("URL", url))
    assert words[:4] == ["python", "-m", "mpi_ckpt", "pull"]
    assert verb(*words[3:]).status == 0
    assert verb("verify", run).status == 0


def test_the_command_that_verify_names_for_the_remote_tier_is_whole(run, url, tmp_path):
    (stored,) = (tmp_path / "remote").rglob("rank00002.h5")
    flip(stored, 100)
    said = verb("verify", "--remote", url)
    assert f"`python -m mpi_ckpt push RUN_DIR --remote {url} --step 30 --again`" in said.out
