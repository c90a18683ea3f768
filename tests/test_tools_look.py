"""The verbs that only look: ls, show, verify; and what all verbs promise: no MPI, plain errors, exit statuses."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys

import pytest

from mpi_ckpt import cli
from mpi_ckpt.checkpoint import steps
from mpi_ckpt.errors import NoCheckpoint
from mpi_ckpt.tools.locate import reading
from mpi_ckpt.tools.verify import verify
from tests.checkpoints import flip, manifest_of, shard_file, step_dir, write_manifest
from tests.launch import HANG, ROOT
from tests.programs.tool_states import INDEX, arrays
from tests.tool_cases import command, copy_of_run, program, save_on_nodes, verb


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


@pytest.fixture
def root(run):
    return run / "checkpoints"


# -- all verbs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_explains_itself_with_an_example_and_the_exit_statuses(name):
    said = verb(name, "--help")
    assert said.status == 0
    assert f"python -m mpi_ckpt {name} " in said.out.partition("example:")[2]
    assert "exit status:" in said.out
    assert name in verb("--help").out


def test_no_verb_ever_starts_mpi(run, tmp_path):
    calls = [
        *(["ls", run], ["show", run], ["verify", run], ["diff", run, run], ["prune", run, "--keep", 3]),
        *(["reshard", run, "--ranks", 3, "--out", tmp_path / "other"], ["pin", run, 10], ["unpin", run, 10]),
        *(["view", run], ["export", run, "--out", tmp_path / "model"]),
        ["import", tmp_path / "model", "--out", tmp_path / "imported"],
        *(["report", run], ["watch", run, "--once"]),
        ["push", run, "--remote", f"file://{tmp_path}/remote"],
        ["pull", tmp_path / "pulled", "--remote", f"file://{tmp_path}/remote"],
        ["plan", "--ranks", 64, "--nodes", 16, "--bytes", "40GiB"],
        ["scavenge", "--local", run / "checkpoints", "--out", tmp_path / "scavenged"],
        ["repair", run / "checkpoints"],
    ]
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert {call[0] for call in calls} == set(cli.VERBS)
    lines = [f"assert cli.main({[str(word) for word in call]!r}) == 0" for call in calls]
    check = "\n".join(["import sys", "from mpi_ckpt import cli", *lines, "assert 'mpi4py.MPI' not in sys.modules"])
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=HANG, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["ls", "{empty}"], 3, "no checkpoints here"),
        (["verify", "{empty}"], 3, "no checkpoints here"),
        (["show", "{run}", "11"], 3, "step 11 is not committed"),
        (["verify", "{run}", "--step", "999"], 3, "steps 10, 20, 30"),
        (["diff", "{run}:10", "{run}:12"], 3, "step 12"),
        (["pin", "{run}", "40"], 3, "step 40"),
        (["export", "{run}", "--out", "{empty}", "--array", "table"], 1, "'table' does not hold the named parameters"),
        (["prune", "{run}"], 2, "--keep"),
        (["prune", "{run}", "--keep", "0"], 2, "1 or more"),
        (["show", "{run}", "-1"], 2, "usage"),
        (["reshard", "{run}", "--ranks", "two", "--out", "{empty}"], 2, "'two'"),
        (["export", "{run}", "--out", "{empty}", "--max-shard-size", "5 parsecs"], 2, "5 parsecs"),
        (["view", "{run}", "--out", "/proc/none/view.h5"], 1, "/proc/none"),
        (["plan", "--ranks", "8", "--nodes", "4", "--bytes", "1GB", "--scheme", "raid5"], 2, "'raid5'"),
        (["plan", "--ranks", "4", "--nodes", "8", "--bytes", "1GB"], 2, "more nodes than ranks"),
        (["frobnicate"], 2, "frobnicate"),
        ([], 2, "VERB"),
    ],
)
def test_an_error_is_a_plain_line_on_stderr_and_its_kind_is_the_exit_status(run, tmp_path, arguments, status, words):
    (tmp_path / "empty").mkdir()
    said = verb(*(word.format(run=run, empty=tmp_path / "empty") for word in arguments))
    assert said.status == status, said
    assert said.out == ""
    assert words in said.err
    assert "Traceback" not in said.err


def test_a_verb_whose_reader_has_gone_ends_quietly(run):
    document = manifest_of(run / "checkpoints", 30)
    document["meta"] = {f"key{i}": "x" * 100 for i in range(5000)}  # more than a pipe holds
    write_manifest(run / "checkpoints", 30, document)
    verb_process = subprocess.Popen(
        command("show", run), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert verb_process.stdout.readline() == "step       30\n"
    verb_process.stdout.close()
    assert verb_process.stderr.read() == ""
    assert verb_process.wait(timeout=HANG) == 141


# -- ls --------------------------------------------------------------------------------------------------------------


def test_ls_tells_every_state_a_step_can_be_in(run, root):
    verb("pin", run, 20)
    os.rename(step_dir(root, 10) / "manifest.json", step_dir(root, 10) / "manifest.damaged.json")
    shutil.copytree(step_dir(root, 30), step_dir(root, 100))  # its manifest says 30
    step_dir(root, 999).mkdir()
    (step_dir(root, 999) / "rank00000.h5.tmp").write_bytes(b"x" * 57)
    (root / "step_7").mkdir()
    found = {entry["step"]: entry for entry in verb("ls", run, "--json").json}
    assert {step: entry["state"] for step, entry in found.items()} == {
        **{10: "set aside", 20: "pinned", 30: "committed", 100: "unreadable", 999: "uncommitted"}
    }
    assert found[999]["nbytes"] == 57
    on_disk = sum(path.stat().st_size for path in step_dir(root, 20).glob("*.h5"))
    for step in (10, 20, 30):
        assert (found[step]["ranks"], found[step]["nbytes"]) == (4, on_disk)
    lines = verb("ls", root).out.splitlines()  # the root itself does as well
    assert [line.split()[0] for line in lines] == ["step", "10", "20", "30", "100", "999"]
    assert lines[2].endswith("pinned")
    assert " KiB " in lines[2]


def test_ls_lists_a_directory_of_leftovers_alone(tmp_path):
    (tmp_path / "step_00000005").mkdir()
    said = verb("ls", tmp_path)
    assert said.status == 0
    assert said.out.splitlines()[1].split() == ["5", "?", "0", "B", "?", "uncommitted"]


# -- show ------------------------------------------------------------------------------------------------------------


def test_show_tells_people_what_the_manifest_says(run, root):
    said = verb("show", run)
    assert said.status == 0
    document = manifest_of(root, 30)
    for shard in document["shards"]:
        assert any(
            line.split()[:2] == [str(shard["rank"]), shard["path"]] and shard["sha256"][:12] in line
            for line in said.out.splitlines()
        )
    for key, array in arrays(30).items():
        row = next(line for line in said.out.splitlines() if line.startswith(f"  {key} "))
        assert array.dtype.newbyteorder("<").str in row
    for name in INDEX:
        assert f"  {name} " in said.out
    for words in ("step       30", "ranks      4", document["save_id"], "cursor  480", "replicated", "scalar"):
        assert words in said.out


def test_show_json_is_the_manifest_as_it_is(run, root):
    assert verb("show", run, 20, "--json").out == (step_dir(root, 20) / "manifest.json").read_text()


def test_show_trusts_no_manifest_that_was_changed(run, root):
    path = step_dir(root, 20) / "manifest.json"
    path.write_text(path.read_text().replace('"cursor":320', '"cursor":321'))
    said = verb("show", run, 20)
    assert (said.status, said.out) == (1, "")
    assert "manifest_sha256" in said.err


# -- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [[], ["--quick"]])
def test_verify_finds_exactly_the_files_whose_sha256sum_has_changed(run, root, quick):
    assert verb("verify", run, *quick).status == 0
    for step, rank, offset in ((10, 2, 5000), (20, 0, -1), (20, 3, 0)):
        flip(shard_file(root, step, rank), offset)
    changed = set()
    for step in (10, 20, 30):
        for shard in manifest_of(root, step)["shards"]:
            path = step_dir(root, step) / shard["path"]
            if hashlib.sha256(path.read_bytes()).hexdigest() != shard["sha256"]:
                changed.add(str(path))
    said = verb("verify", run, "--json", *quick)
    assert said.status == 1
    assert {fault["path"] for verdict in said.json for fault in verdict["faults"]} == changed
    assert len(changed) == 3
    assert [verdict["intact"] for verdict in said.json] == [False, False, True]
    assert verb("verify", run, "--step", 30, *quick).status == 0
    assert verb("verify", run, "--step", 20, *quick).status == 1


def test_verify_names_every_kind_of_damage_and_goes_on(run, root):
    shard_file(root, 10, 1).unlink()
    with shard_file(root, 10, 2).open("ab") as file:
        file.write(b"1234")
    shard_file(root, 20, 0).unlink()
    shard_file(root, 20, 0).mkdir()
    manifest = step_dir(root, 30) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"run":"tools"', '"run":"foods"'))
    said = verb("verify", run, "--json")
    kinds = [[fault["kind"] for fault in verdict["faults"]] for verdict in said.json]
    assert kinds == [["MissingShard", "CorruptShard"], ["CorruptShard"], ["InvalidManifest"]]
    text = verb("verify", run).out.splitlines()
    assert [line.split()[-1] for line in text if line.startswith("step")] == ["DAMAGED"] * 3
    assert len(text) == 10, "what helps comes after the faults of each"


def test_nothing_committed_is_nothing_to_verify(tmp_path):
    (tmp_path / "step_00000005").mkdir()
    assert verb("verify", tmp_path).status == 3


def test_verify_changes_nothing(run, root):
    def look():
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in root.rglob("*")}

    before = look()
    verb("verify", run)
    assert look() == before


def test_a_progress_bar_is_for_terminals_only(run):
    assert program("verify", run).stderr == ""
    parent, child = pty.openpty()
    try:
        outcome = subprocess.run(
            command("verify", run), cwd=ROOT, stdout=subprocess.PIPE, stderr=child, timeout=HANG,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(child)
        shown = os.read(parent, 100_000)
    finally:
        os.close(parent)
    assert b"verify" in shown
    assert b"\x1b" in shown
    assert outcome.stdout.count(b"intact") == 3  # the lines themselves stay in stdout
    assert b"\x1b" not in outcome.stdout


def test_json_of_every_looking_verb_is_strict(run):
    def refuse(constant):
        raise AssertionError(constant)

    for arguments in (["ls", run], ["show", run], ["verify", run], ["diff", f"{run}:10", f"{run}:20"]):
        json.loads(verb(*arguments, "--json").out, parse_constant=refuse)


# -- which place -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ls", "verify"])
def test_what_is_read_beside_a_run_are_the_nodes_and_it_says_so(run, root, tmp_path, name):
    nodes = save_on_nodes(tmp_path, "ab")
    flip(shard_file(root, 30, 0), 5000)  # which nobody reads here
    said = verb(name, run, "--local", nodes / "{domain}")
    assert said.status == 0
    assert said.out.splitlines()[0] == f"on the nodes {nodes / 'a'}, {nodes / 'b'} (not in {run}):"
    assert verb(name, "--local", nodes / "a").out.splitlines()[0] == f"on the nodes {nodes / 'a'}:"
    assert "on the nodes" not in verb(name, run).out


def test_the_json_of_verify_names_the_directory(run, root):
    assert [v["directory"] for v in verb("verify", run, "--json").json] == [
        str(step_dir(root, step)) for step in (10, 20, 30)
    ]


@pytest.mark.parametrize(
    "arguments", [["ls", "{run}"], ["show", "{run}"], ["verify", "{run}"], ["push", "{run}", "--remote", "file:///x"]]
)
@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_a_run_without_steps_of_its_own_may_have_them_in_another_tier(run, root, arguments, place):
    shutil.rmtree(root)
    root.mkdir()
    (run / "run.json").write_text("{}")
    said = verb(*(word.format(run=run / place) for word in arguments))
    assert said.status == 3
    assert "run.json" in said.err
    assert f"`python -m mpi_ckpt ls {run} --local DIR ...` or `python -m mpi_ckpt ls --remote URL`" in said.err
    assert "--run-dir" not in said.err


@pytest.mark.parametrize("arguments", [["show", 11], ["pin", 11], ["verify", "--step", 11]])
def test_the_command_that_an_error_names_works(run, arguments):
    said = verb(arguments[0], run, *arguments[1:])
    words = shlex.split(said.err.split("`")[1])
    assert words[:4] == ["python", "-m", "mpi_ckpt", "ls"]
    assert verb(*words[3:]).status == 0


def test_an_empty_remote_tier_does_not_advise_to_look_into_it_again(run, tmp_path):
    url = f"file://{tmp_path}/remote"
    said = verb("ls", "--remote", url)
    assert said.status == 3
    assert "mpi_ckpt ls" not in said.err
    words = shlex.split(said.err.split("`")[1].replace("RUN_DIR", str(run)))
    assert verb(*words[3:]).status == 0
    assert f"`python -m mpi_ckpt ls --remote {url}`" in verb("verify", "--remote", url, "--step", 7).err


def test_repair_of_too_few_nodes_asks_for_the_others(tmp_path):
    nodes = save_on_nodes(tmp_path, "abcd")
    said = verb("repair", nodes / "a", nodes / "b")
    assert said.status == 1
    assert "Name the directories of the other nodes" in said.err
    assert "Restore an older step" not in said.err


# -- beside a running writer -----------------------------------------------------------------------------------------


def test_a_step_that_is_pruned_while_it_is_read_is_no_damage(run, root):
    directory = step_dir(root, 20)

    def read_while_it_goes():
        with reading(directory):
            steps.delete(directory)
            shard_file(root, 20, 0).stat()

    with pytest.raises(NoCheckpoint, match="pruned or replaced"):
        read_while_it_goes()
    assert list(verify(root, steps=[20])) == []  # listed before, gone now
    with pytest.raises(FileNotFoundError), reading(step_dir(root, 30)):
        (root / "none").stat()  # the step is still there: some other file is missing


def test_a_step_that_is_saved_again_while_it_is_verified_is_no_damage(run, root):
    """The older save's file goes when its first file has been read; the newer save is the one to be judged."""
    document = manifest_of(root, 20)
    document["save_id"] = "0123456789abcdef"
    for shard in document["shards"]:
        old = shard["path"]
        shard["path"] = f"rank{shard['rank']:05d}-0123456789abcdef.h5"
        shutil.copy(step_dir(root, 20) / old, step_dir(root, 20) / shard["path"])
    shard_file(root, 20, 3).unlink()

    def overwrite(nbytes):
        write_manifest(root, 20, document)

    (verdict,) = verify(root, steps=[20], advance=overwrite)
    assert verdict.intact
