"""The verbs that write: reshard, prune, pin, unpin, view."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import h5py
import numpy as np
import pytest

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.layout import shard_range
from mpi_ckpt.storage import names
from mpi_ckpt.tools import source
from tests.checkpoints import flip, manifest_of, shard_file, step_dir
from tests.launch import HANG, ROOT
from tests.programs.tool_states import N, arrays
from tests.tool_cases import copy_of_run, flip_in_array, verb


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


@pytest.fixture
def root(run):
    return run / "checkpoints"


# -- reshard ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_resharded_step_is_restored_by_that_many_ranks_as_if_they_had_saved_it(run, tmp_path, launch, ranks):
    said = verb("reshard", run, "--step", 20, "--ranks", ranks, "--out", tmp_path / "other")
    assert said.status == 0, said
    outcome = launch(ranks, "-m", "tests.programs.tool_states", "restore", str(tmp_path / "other"), "20").check()
    assert f"{ranks} ranks restored step 20" in outcome.stdout
    assert verb("verify", tmp_path / "other").status == 0


@pytest.mark.parametrize("window", [source.WINDOW_BYTES, 40])
def test_a_resharded_step_is_dealt_evenly_and_holds_the_same_to_the_bit(run, tmp_path, monkeypatch, window):
    monkeypatch.setattr(source, "WINDOW_BYTES", window)
    verb("reshard", run, "--ranks", 3, "--out", tmp_path / "other")
    said = verb("diff", run, tmp_path / "other")
    assert said.status == 0, said.out
    old, new = manifest_of(run / "checkpoints", 30), manifest_of(tmp_path / "other", 30)
    for key in ("step", "meta", "metrics", "index", "arrays", "wall_clock_seconds"):
        assert new[key] == old[key]
    assert (new["world_size"], len(new["shards"])) == (3, 3)
    for shard in new["shards"]:
        start, stop = shard_range(N, 3, shard["rank"])
        assert (shard["param_shard_offset"], shard["param_shard_numel"]) == (start, stop - start)
        with h5py.File(step_dir(tmp_path / "other", 30) / shard["path"]) as file:
            for key in ("param", "interleaved", "few", "field/tiles", "field/mask"):
                whole = arrays(30)[key]
                part = whole[slice(*shard_range(len(whole), 3, shard["rank"]))]
                assert file[f"arrays/{key}"][()].tobytes() == part.tobytes()


def test_resharding_back_brings_every_rank_its_own_values_again(run, tmp_path, launch):
    for ranks, old, out in ((3, run, "three"), (7, tmp_path / "three", "seven"), (4, tmp_path / "seven", "four")):
        assert verb("reshard", old, "--ranks", ranks, "--out", tmp_path / out).status == 0
    assert verb("diff", run, tmp_path / "four").status == 0
    for rank in range(4):
        documents = []
        for root in (run / "checkpoints", tmp_path / "four"):
            with h5py.File(shard_file(root, 30, rank)) as file:
                documents.append(json.loads(bytes(file["values"][()])))
        assert documents[0] == documents[1]
    launch(4, "-m", "tests.programs.tool_states", "restore", str(tmp_path / "four"), "30").check()


def test_reshard_refuses_a_step_that_is_there_and_a_damaged_source_and_leaves_nothing(run, root, tmp_path):
    out = tmp_path / "other"
    assert verb("reshard", run, "--ranks", 2, "--out", out).status == 0
    before = sorted(out.rglob("*"))
    said = verb("reshard", run, "--ranks", 3, "--out", out)
    assert said.status == 1
    assert "committed already" in said.err
    assert sorted(out.rglob("*")) == before
    damaged = flip_in_array(root, 20, 3, "master")
    said = verb("reshard", run, "--step", 20, "--ranks", 3, "--out", out)
    assert said.status == 1
    assert str(damaged) in said.err
    assert sorted(out.rglob("*")) == before


def test_every_shard_is_durable_before_the_manifest_appears(run, tmp_path, monkeypatch):
    done = []

    def recorded(name):
        call = getattr(os, name)

        def record(first, *rest):
            what = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(rest[0])
            found = call(first, *rest)
            done.append((name, what.rpartition("/")[2]))
            return found

        return record

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(name))
    assert verb("reshard", run, "--ranks", 2, "--out", tmp_path / "other").status == 0
    own = [each for each in done if each[1] not in ("other", tmp_path.name)]
    shards = ("rank00000.h5", "rank00001.h5")
    expected = [("fsync", f"{name}.tmp") for name in shards]
    for name in shards:
        expected += [("rename", name), ("fsync", "step_00000030")]
    expected += [("fsync", "manifest.json.tmp"), ("rename", "manifest.json"), ("fsync", "step_00000030")]
    assert own == expected


@pytest.mark.parametrize("victim", ["rank00001.h5", "manifest.json"])
def test_killed_before_the_manifest_there_is_no_step_and_the_next_attempt_succeeds(run, tmp_path, victim):
    script = f"""
        import os, signal, sys
        rename = os.rename
        def killing(source, target):
            if os.path.basename(target) == {victim!r}:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)
        os.rename = killing
        from mpi_ckpt import cli
        cli.main(["reshard", sys.argv[1], "--ranks", "3", "--out", sys.argv[2]])
    """
    out = tmp_path / "other"
    command = [sys.executable, "-c", textwrap.dedent(script), str(run), str(out)]
    assert subprocess.run(command, cwd=ROOT, timeout=HANG, check=False).returncode == -signal.SIGKILL
    assert names.list_steps(out) == []
    assert verb("ls", out).out.splitlines()[1].endswith("uncommitted")
    assert verb("reshard", run, "--ranks", 3, "--out", out).status == 0
    assert verb("diff", run, out).status == 0
    assert sorted(path.name for path in step_dir(out, 30).iterdir()) == [
        "manifest.json", "rank00000.h5", "rank00001.h5", "rank00002.h5"
    ]  # fmt: skip


@pytest.mark.parametrize("victim", ["rank00001.h5", "manifest.json"])
def test_a_disk_that_fails_when_files_get_their_names_leaves_none(run, tmp_path, monkeypatch, victim):
    real = os.rename

    def failing(source, target):
        if os.path.basename(target) == victim:
            raise OSError(errno.EIO, "Input/output error", str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    said = verb("reshard", run, "--ranks", 3, "--out", tmp_path / "other")
    assert said.status == 1
    assert victim in said.err
    assert [path.name for path in (tmp_path / "other").rglob("*")] == ["writer.lock"]


def test_arrays_larger_than_memory_allows_are_streamed(tmp_path):
    """192 MB in one array: no verb that copies or compares it holds more than a fraction of it."""
    script = """
        import sys
        from pathlib import Path
        import numpy as np
        from mpi_ckpt import cli
        from mpi_ckpt.layout import Block
        from mpi_ckpt.storage.manifest import ArrayRecord
        from mpi_ckpt.storage.shard_file import BlockToWrite, StreamedArray
        from mpi_ckpt.tools.writing import NewStep, write_step
        n, here = 48_000_000, Path(sys.argv[1])
        def copy(lo, out):
            out.view("<u4")[...] = np.arange(lo // 4, (lo + out.size) // 4, dtype="<u4")
        def contents(rank):
            array = StreamedArray(np.dtype("<f4"), (n,), copy)
            return [BlockToWrite("param", array, Block((0,), (n,)), (n,))], {"per_rank": {}, "replicated": {}}
        arrays, index = {"param": ArrayRecord("<f4", (n,))}, {"w": (0, (n,))}
        write_step(here / "a", NewStep(1, 1, 4 * n, arrays, contents, index=index))
        a, b, c, model = (str(here / name) for name in ("a", "b", "c", "model"))
        for words in (["reshard", a, "--ranks", "3", "--out", b], ["diff", a, b],
                      ["export", b, "--out", model], ["import", model, "--out", c], ["verify", c]):
            assert cli.main(words) == 0
        peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        print(int(peak.split()[1]) // 1024)  # not ru_maxrss, which counts what the parent had before this program began
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True)
    shutil.rmtree(tmp_path)
    assert int(outcome.stdout.split()[-1]) < 160  # MiB, of which Python, NumPy and h5py take about 60


# -- prune, pin, unpin -----------------------------------------------------------------------------------------------


def test_prune_deletes_what_it_says_it_would(run, root):
    before = sorted(root.rglob("*"))
    said = verb("prune", run, "--keep", 1, "--dry-run", "--json")
    assert (said.status, said.json["deleted"], said.json["left"]) == (0, [10, 20], [30])
    assert sorted(root.rglob("*")) == before
    assert verb("prune", run, "--keep", 1, "--json").json["deleted"] == [10, 20]
    assert sorted(path.name for path in root.iterdir()) == ["step_00000030", "writer.lock"]


def test_pinned_steps_stay_and_do_not_count(run, root):
    assert verb("pin", run, 30).status == verb("pin", run, 30).status == 0
    verb("prune", run, "--keep", 1)
    assert names.list_steps(root) == [20, 30]
    assert verb("unpin", run, 30).status == verb("unpin", run, 30).status == 0
    verb("prune", run, "--keep", 1)
    assert names.list_steps(root) == [30]


def test_keep_every_keeps_the_steps_that_it_divides(run, root):
    verb("prune", run, "--keep", 1, "--keep-every", 20)
    assert names.list_steps(root) == [20, 30]


def test_a_damaged_step_does_not_count_toward_those_to_keep(run, root):
    flip(shard_file(root, 30, 2), -100)
    said = verb("prune", run, "--keep", 1)
    assert said.status == 1
    assert "step       30  is damaged" in said.out
    assert names.list_steps(root) == [20, 30]
    assert verb("prune", run, "--keep", 1, "--no-verify").status == 0
    assert names.list_steps(root) == [30]


def test_files_of_others_in_a_step_survive_its_deletion(run, root):
    (step_dir(root, 10) / "notes.txt").write_text("mine")
    verb("prune", run, "--keep", 1)
    assert [path.name for path in step_dir(root, 10).iterdir()] == ["notes.txt"]


def test_prune_refuses_beside_a_running_writer(run, root):
    script = """
        import sys
        from pathlib import Path
        from mpi_ckpt.storage.lock import WriterLock
        lock = WriterLock(Path(sys.argv[1]), "feedbeefcafe")
        print("locked", flush=True)
        sys.stdin.read()
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(root)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert writer.stdout.readline() == "locked\n"
        said = verb("prune", run, "--keep", 1)
        assert verb("prune", run, "--keep", 1, "--dry-run").status == 0  # looking is allowed
        assert verb("pin", run, 10).status == 0  # and so is pinning
    finally:
        writer.communicate("", timeout=HANG)
    assert said.status == 1
    assert "feedbeefcafe" in said.err
    assert names.list_steps(root) == [10, 20, 30]


# -- view ------------------------------------------------------------------------------------------------------------


def test_a_view_shows_every_array_whole_and_copies_nothing(run, root):
    said = verb("view", run, "--step", 20)
    assert said.out == f"{root / 'step_00000020.view.h5'}\n"
    with h5py.File(said.out.strip()) as file:
        seen = {}
        file["arrays"].visititems(lambda key, found: seen.update({key: found[()]} if hasattr(found, "shape") else {}))
        assert all(file[f"arrays/{key}"].is_virtual for key, array in arrays(20).items() if array.size)
    for key, array in arrays(20).items():
        assert seen[key].dtype == array.dtype
        assert seen[key].shape == array.shape
        assert np.asarray(seen[key]).tobytes() == array.tobytes()
    assert seen.keys() == arrays(20).keys()


@pytest.mark.parametrize("out", [None, "views/of 100%b.h5"])
def test_a_view_stays_valid_when_it_is_moved_with_the_run(run, tmp_path, out):
    where = [] if out is None else ["--out", run / out]
    path = verb("view", run, *where).out.strip()
    moved = tmp_path / "else where" / "deep"
    moved.parent.mkdir()
    shutil.move(run, moved)
    with h5py.File(path.replace(str(run), str(moved))) as file:
        assert file["arrays/master"][()].tobytes() == arrays(30)["master"].tobytes()


def test_a_view_of_a_directory_with_percent_signs_in_its_name_finds_the_shards(run, tmp_path):
    odd = tmp_path / "100%b" / "run"
    odd.parent.mkdir()
    shutil.move(run, odd)
    said = verb("view", odd, "--out", tmp_path / "view.h5")
    with h5py.File(said.out.strip()) as file:
        assert file["arrays/field/tiles"][()].tobytes() == arrays(30)["field/tiles"].tobytes()


def test_what_is_missing_behind_a_view_reads_as_nan_or_the_largest_value(run, root):
    path = verb("view", run).out.strip()
    shard_file(root, 30, 0).unlink()
    stop = shard_range(N, 4, 0)[1]
    with h5py.File(path) as file:
        master, mask, interleaved = (file[f"arrays/{key}"][()] for key in ("master", "field/mask", "interleaved"))
        assert np.isnan(file["arrays/few"][0])
        assert file["arrays/scalar"][()] == 2**31 - 1
    assert np.isnan(master[:stop]).all()
    assert master[stop:].tobytes() == arrays(30)["master"][stop:].tobytes()
    assert mask[: shard_range(57, 4, 0)[1]].all()
    assert (interleaved[: shard_range(N, 8, 0)[1]] == 2**63 - 1).all()


def test_a_view_is_refused_where_a_shard_has_another_size_or_the_place_is_taken(run, root, tmp_path):
    (tmp_path / "mine.h5").write_bytes(b"precious")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    for place in (tmp_path / "mine.h5", tmp_path / "other.h5", step_dir(root, 30) / "rank00009.h5", tmp_path):
        assert verb("view", run, "--out", place).status == 1
    assert (tmp_path / "mine.h5").read_bytes() == b"precious"
    with shard_file(root, 30, 1).open("ab") as file:
        file.write(b"1")
    said = verb("view", run)
    assert said.status == 1
    assert str(shard_file(root, 30, 1)) in said.err
    assert not (root / "step_00000030.view.h5").exists()


def test_a_view_is_replaced_by_a_newer_one_and_is_garbage_to_nobody(run, root):
    view = verb("view", run).out.strip()
    assert verb("view", run, "--step", 10, "--out", view).status == 0
    with h5py.File(view) as file:
        assert file.attrs["step"] == 10
    verb("prune", run, "--keep", 1)
    steps.clean(root)
    assert os.path.exists(view)
    assert [entry["step"] for entry in verb("ls", run, "--json").json] == [30]
