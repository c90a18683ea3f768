"""Names on disk: parsed strictly, listed in the order of numbers, foreign things left alone."""

from __future__ import annotations

import statistics
import time

import pytest

from mpi_ckpt.storage import names


def make_steps(root, *steps, committed=True):
    for step in steps:
        directory = names.step_dir(root, step)
        directory.mkdir(parents=True)
        if committed:
            names.manifest_path(directory).touch()


def test_steps_are_listed_in_numeric_order(tmp_path):
    make_steps(tmp_path, 1000, 9, 100, 11, 10, 99, 123456789)
    assert names.list_steps(tmp_path) == [9, 10, 11, 99, 100, 1000, 123456789]


def test_a_step_without_a_manifest_is_not_committed(tmp_path):
    make_steps(tmp_path, 1, 3)
    make_steps(tmp_path, 2, 999, committed=False)
    (names.step_dir(tmp_path, 999) / "rank00000.h5").touch()
    (names.step_dir(tmp_path, 2) / "manifest.damaged.json").touch()
    (names.step_dir(tmp_path, 2) / "manifest.json.tmp").touch()
    assert names.list_steps(tmp_path) == [1, 3]
    assert names.list_uncommitted(tmp_path) == [2, 999]


def test_a_root_that_does_not_exist_holds_no_steps(tmp_path):
    assert names.list_steps(tmp_path / "none") == names.list_uncommitted(tmp_path / "none") == []


@pytest.mark.parametrize(
    "name",
    [
        *("step_10", "step_0000001x", "step_000000010", "step_", "step_-0000001", "Step_00000010", "step_00000010.tmp"),
        *(
            "step_00000010 ",
            "step_00000010\n",
            "step_٠٠٠٠٠٠١٠",
            "step_+0000010",
            "step_0000_010",
            "x",
            "step_" + "9" * 19,
        ),
    ],
)
def test_what_is_not_exactly_a_step_name_is_somebody_elses(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / names.MANIFEST).touch()
    assert names.parse_step(name) is None
    assert names.list_steps(tmp_path) == names.list_uncommitted(tmp_path) == []


def test_a_file_or_a_symbolic_link_is_no_step(tmp_path):
    make_steps(tmp_path / "elsewhere", 10)
    (tmp_path / "step_00000010").symlink_to(tmp_path / "elsewhere" / "step_00000010")
    (tmp_path / "step_00000011").touch()
    assert names.list_steps(tmp_path) == names.list_uncommitted(tmp_path) == []


@pytest.mark.parametrize("step", [0, 1, 10, 99_999_999, 100_000_000, 10**18 - 1])
def test_step_names_round_trip(tmp_path, step):
    assert names.parse_step(names.step_dir(tmp_path, step).name) == step


def test_small_steps_have_eight_digits(tmp_path):
    assert names.step_dir(tmp_path, 10).name == "step_00000010"


@pytest.mark.parametrize("step", [-1, 10**18])
def test_a_step_that_no_name_can_hold_is_an_error(tmp_path, step):
    with pytest.raises(ValueError, match="step"):
        names.step_dir(tmp_path, step)


@pytest.mark.parametrize(("rank", "save_id"), [(0, None), (2, "0123456789abcdef"), (99_999, None), (100_000, None)])
def test_shard_names_round_trip(rank, save_id):
    assert names.parse_shard(names.shard_name(rank, save_id)) == (rank, save_id)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "rank2.h5",
            "rank00002.h5.tmp",
            "rank000002.h5",
            "rank00002-.h5",
            "rank00002-xyz.h5",
            "rank00002-ABCDEF01.h5",
        ),
        *("../rank00002.h5", "/rank00002.h5", "rank00002.h5\n", "rank-0002.h5", "rank00002_h5", "rank٠٠٠٠٢.h5"),
    ],
)
def test_what_is_not_exactly_a_shard_name_is_none(name):
    assert names.parse_shard(name) is None


def test_new_save_ids_are_save_ids_and_differ():
    ids = {names.new_save_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(map(names.is_save_id, ids))


def test_own_files_are_told_from_foreign_ones(tmp_path):
    own = ["rank00000.h5", "rank00001-0123456789abcdef.h5", "rank00001.h5.tmp", "manifest.json", "manifest.json.tmp"]
    own += ["manifest.damaged.json", "pinned"]
    for name in [*own, "notes.txt", "rank1.h5", "manifest.json.bak", "rank00000.h5~", "pinned.txt"]:
        (tmp_path / name).touch()
    (tmp_path / "rank00007.h5").mkdir()
    (tmp_path / "rank00008.h5").symlink_to(tmp_path / "rank00007.h5")  # a link goes, what it leads to stays
    own.append("rank00008.h5")
    assert [path.name for path in names.own_files(tmp_path)] == sorted(own)
    assert names.own_files(tmp_path / "none") == []


def test_the_temporary_name_is_undone_by_the_published_one(tmp_path):
    path = tmp_path / "rank00002.h5"
    assert names.tmp(path).name == "rank00002.h5.tmp"
    assert names.published(names.tmp(path)) == names.published(path) == path


def test_a_thousand_steps_are_listed_in_less_than_100_ms(tmp_path):
    make_steps(tmp_path, *range(0, 10_000, 10))
    make_steps(tmp_path, *range(5, 1000, 10), committed=False)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        assert names.list_steps(tmp_path)[-1] == 9990
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.1
