"""Restoring: strict, the same error on every rank before any array is touched, damage found, the right step chosen."""

from __future__ import annotations

import copy
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_ckpt import (
    Checkpointer,
    CheckpointError,
    CorruptShard,
    InvalidManifest,
    LayoutMismatch,
    MissingShard,
    NoCheckpoint,
    PerRank,
    SaveFailed,
    Shard,
    StepExists,
    UnknownSchema,
    load_sharded,
    shard_range,
)
from mpi_ckpt.checkpoint.state import walk
from tests.checkpoints import (
    bits,
    exact,
    flip,
    is_poisoned,
    manifest_of,
    meet,
    on_one,
    poisoned,
    raised,
    same_bits,
    shard_file,
    step_dir,
    write_manifest,
)
from tests.golden import v1_state

N = 1009
GOLDEN = Path(__file__).parent / "golden" / "v1"


def state(comm, step: int | None) -> dict[str, Any]:
    """This rank's state at a step; poisoned for None."""
    start, stop = shard_range(N, comm.size, comm.rank)

    def make(shape: tuple[int, ...], dtype: str, part: slice = slice(None)) -> np.ndarray:
        return poisoned(shape, dtype)[part] if step is None else bits(shape, dtype, step)[part].copy()

    return {
        "master": Shard(make((N,), "<f4", slice(start, stop)), start, N),
        "half": Shard(make((N,), "<f2", slice(start, stop)), start, N),
        "table": make((3, 2), "<f8"),
        "n": step,
        "own": PerRank(None if step is None else (step, comm.rank)),
    }


def holds(target: dict[str, Any], comm, step: int) -> bool:
    expected = state(comm, step)
    return (
        same_bits(target["master"].array, expected["master"].array)
        and same_bits(target["half"].array, expected["half"].array)
        and same_bits(target["table"], expected["table"])
        and target["n"] == step
        and target["own"].value == (step, comm.rank)
    )


def untouched(target: dict[str, Any]) -> bool:
    leaves = walk(target)
    arrays = [*leaves.arrays.values(), *(shard.array for shards in leaves.shards.values() for shard in shards)]
    values = [parent[name] for parent, name in leaves.values.values()] + [
        leaf.value for leaf in leaves.per_rank.values()
    ]
    return all(map(is_poisoned, arrays)) and values == [None] * len(values)


def save(root: Path, comm, *numbers: int, **options) -> None:
    with Checkpointer(root, comm, keep=None, **options) as checkpointer:
        for number in numbers:
            checkpointer.save(number, state(comm, number))


# -- strictness ------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_key_kind_dtype_and_shape_must_be_the_saved_ones_or_all_ranks_say_so_with_nothing_touched(comm, shared_path):
    start, stop = shard_range(N, comm.size, comm.rank)

    def part(dtype: str, n: int = N, shape: tuple[int, ...] | None = None) -> Shard:
        return Shard(poisoned((stop - start,), dtype), start, n) if shape is None else Shard(
            poisoned((stop - start, *shape[1:]), dtype), (start, *[0] * (len(shape) - 1)), shape
        )  # fmt: skip

    read_only = poisoned((3, 2), "<f8")
    read_only.flags.writeable = False
    mistakes: dict[str, tuple[str, Any]] = {
        "fp32 into fp16": ("master", part("<f2")),
        "fp16 into fp32": ("half", part("<f4")),
        "float into integer": ("master", part("<i4")),
        "float into complex": ("table", poisoned((3, 2), "<c8")),
        "another global shape": ("master", part("<f4", N + 1)),
        "one more axis": ("master", part("<f4", shape=(N, 1))),
        "another shape": ("table", poisoned((2, 3), "<f8")),
        "one row less": ("table", poisoned((2, 2), "<f8")),
        "a read-only target": ("table", read_only),
        "a sharded array into a replicated one": ("master", poisoned((N,), "<f4")),
        "a replicated array into a sharded one": ("table", part("<f8", shape=(N, 2))),
        "an array into a value": ("table", None),
        "a value into an array": ("n", poisoned((), "<i8")),
        "a value into a value per rank": ("n", PerRank(None)),
        "a value per rank into a value": ("own", None),
        "a key that is not in the checkpoint": ("new", None),
        "an array that is not in the checkpoint": ("new", poisoned((3,), "<f4")),
        "a key below": ("n", {"n": PerRank(None)}),
    }
    root = shared_path / "c"
    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(1, state(comm, 1))
        for name, (key, leaf) in mistakes.items():
            for odd in ([0, 1, 2], [0], [2]):  # on all ranks, on one only
                target = state(comm, None) | ({key: leaf} if comm.rank in odd else {})
                error = raised(comm, LayoutMismatch, lambda target=target: checkpointer.restore(target))
                assert f"'{key}" in str(error), name
                assert str(step_dir(root, 1)) in str(error) or "read-only" in str(error)
                assert error.rank == odd[0], name
                assert untouched(target), name
        for key in state(comm, None):
            target = state(comm, None)
            del target[key]
            error = raised(comm, LayoutMismatch, lambda target=target: checkpointer.restore(target))
            assert repr(key) in str(error)
            assert untouched(target)
        target = state(comm, None)
        assert checkpointer.restore(target).step == 1
        assert holds(target, comm, 1)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_keys_restores_what_it_names_and_neither_reads_nor_checks_the_rest(comm, shared_path):
    root = shared_path / "c"

    def nested(step: int | None) -> dict[str, Any]:
        return {"model": {"a": state(comm, step), "b": state(comm, step)}, "model2": state(comm, step)}

    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(1, nested(7))
        target = nested(None)
        target["model"]["b"]["half"] = None  # not what was saved; nobody asked
        checkpointer.restore(target, keys=["model/a", "model2/n"])
        assert holds(target["model"]["a"], comm, 7)
        assert untouched(target["model"]["b"])
        assert target["model2"].pop("n") == 7
        assert untouched(target["model2"])
        only = {"model": {"b": {"own": PerRank(None)}}}
        assert checkpointer.restore(only, keys=["model"]).step == 1
        assert only["model"]["b"]["own"].value == (7, comm.rank)
        blocks = manifest_of(root, 1)["shards"][comm.rank]["blocks"]
        flip(shard_file(root, 1, comm.rank), blocks["model/b/half"][0]["offset"])
        comm.Barrier()
        target = nested(None)
        assert checkpointer.restore(target, keys=["model/a", "model2"]).step == 1
        assert holds(target["model"]["a"], comm, 7)
        raised(comm, CorruptShard, lambda: checkpointer.restore(nested(None), keys=["model/b"]))
        for keys in (["model/c"], ["mode"], ["model/a", ""], ["model2/n/x"]):
            target = nested(None)
            raised(comm, LayoutMismatch, lambda target=target, keys=keys: checkpointer.restore(target, keys=keys))
            assert all(map(untouched, (*target["model"].values(), target["model2"])))
        assert checkpointer.restore(nested(None), keys=[]).step == 1


@pytest.mark.mpi(ranks=[1], timeout=60, unit="s")
def test_options_are_checked_by_name(comm, shared_path):
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        for option in ({"world_size": 4}, {"verify": "fast"}, {"verify": True}, {"on_damage": "oldest"}):
            with pytest.raises(ValueError, match=rf"^{next(iter(option))}: found .* expected one of '"):
                checkpointer.restore({}, **option)
        for step in (-1, True, 1.0, "1", None):
            with pytest.raises(ValueError, match=r"^step: found"):
                checkpointer.save(step, {})
    for option in ({"keep": 0}, {"keep": True}, {"every": 10}, {"every": "soon"}):
        with pytest.raises(ValueError, match=rf"^{next(iter(option))}: found"):
            Checkpointer(shared_path / "d", comm, **option)
    assert not (shared_path / "d").exists()


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0\0\0\0")


def swap(path: Path) -> None:
    other = path.with_name("rank00000.h5")
    data = other.read_bytes()
    other.write_bytes(path.read_bytes())
    path.write_bytes(data)


def of_another_step(path: Path) -> None:
    shutil.copyfile(step_dir(path.parents[1], 2) / path.name, path)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def place(root: Path, rank: int, what: str) -> int:
    record = manifest_of(root, 1)["shards"][rank]
    return {"head": 100, "values": record["values"]["offset"], "table": record["blocks"]["half"][0]["table_offset"],
            "data": record["blocks"]["half"][0]["offset"] + 333}[what]  # fmt: skip


EVERY, DIGESTS, FULL = ("full", "quick", "none"), ("full", "quick"), ("full",)
DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], tuple[str, ...]]] = {
    "a missing shard": (Path.unlink, MissingShard, EVERY),
    "4 bytes cut off": (truncate, CorruptShard, EVERY),
    "4 bytes appended": (append, CorruptShard, EVERY),
    "an empty file": (lambda path: path.write_bytes(b""), CorruptShard, EVERY),
    "a symbolic link": (link, CorruptShard, EVERY),
    "a directory": (directory, CorruptShard, EVERY),
    "a bit in the data": (lambda path: flip(path, place(path.parents[1], 1, "data")), CorruptShard, DIGESTS),
    "a bit in the values": (lambda path: flip(path, place(path.parents[1], 1, "values")), CorruptShard, EVERY),
    "a bit in the checksums": (lambda path: flip(path, place(path.parents[1], 1, "table")), CorruptShard, DIGESTS),
    "a bit in the HDF5 head": (lambda path: flip(path, place(path.parents[1], 1, "head")), CorruptShard, FULL),
    "the last bit": (lambda path: flip(path, -1), CorruptShard, DIGESTS),
    "two shards swapped": (swap, CorruptShard, DIGESTS),
    "a shard of another step": (of_another_step, CorruptShard, DIGESTS),
}


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_any_damage_to_one_rank_s_file_is_every_rank_s_error_at_the_levels_that_promise_it(comm, shared_path):
    origin, root = shared_path / "origin", shared_path / "c"
    with Checkpointer(origin, comm) as checkpointer:
        for step in (1, 2):  # values of one length, so that sizes alone betray nothing
            checkpointer.save(step, state(comm, 1))
    for name, (damage, kind, levels) in DAMAGES.items():

        def afresh(damage=damage) -> None:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(origin, root, symlinks=True)
            if damage is of_another_step:  # same values, other arrays would be found by sizes of values only
                flip(shard_file(root, 2, 1), place(root, 1, "data"))
            damage(shard_file(root, 1, 1))

        on_one(comm, afresh)
        with Checkpointer(root, comm, read_only=True) as checkpointer:
            for level in EVERY:
                target = state(comm, None)
                if level not in levels:
                    if name != "two shards swapped":
                        assert checkpointer.restore(target, 1, verify=level).step == 1, name
                    continue
                error = raised(
                    comm, kind, lambda target=target, level=level: checkpointer.restore(target, 1, verify=level)
                )
                guilty = "rank0000" if name == "two shards swapped" else "rank00001.h5"
                assert str(step_dir(root, 1) / guilty) in str(error), f"{name}: {error}"
                assert error.rank in ((0, 1) if name == "two shards swapped" else (1,)), name
                assert "expected" in str(error)
                if levels == EVERY and name != "a bit in the values":
                    assert untouched(target), f"{name}: found by its size, yet arrays were touched"
        if kind is CorruptShard:
            raised(comm, kind, lambda: load_sharded(root, comm.size, comm, 1))


def set_at(*path: Any, value: Any) -> Callable[[dict], None]:
    def change(document: dict) -> None:
        for name in path[:-1]:
            document = document[name]
        document[path[-1]] = value

    return change


def remove(*path: Any) -> Callable[[dict], None]:
    def change(document: dict) -> None:
        for name in path[:-1]:
            document = document[name]
        del document[path[-1]]

    return change


def half(document: dict) -> dict:
    return document["shards"][1]["blocks"]["half"][0]


BLOCK = ("shards", 1, "blocks", "master", 0)
TAMPERED: dict[str, tuple[Callable[[dict], Any], str]] = {
    "an overlap": (set_at(*BLOCK, "start", value=[504]), "arrays"),
    "a gap": (set_at(*BLOCK, "shape", value=[503]), "arrays"),
    "a block beyond the array": (set_at(*BLOCK, "start", value=[506]), "arrays"),
    "a negative start": (set_at(*BLOCK, "start", value=[-1]), "start"),
    "a huge start": (set_at(*BLOCK, "start", value=[2**63]), "start"),
    "a start that is a float": (set_at(*BLOCK, "start", value=[505.0]), "start"),
    "a block of two axes": (set_at(*BLOCK, "shape", value=[504, 1]), "shape"),
    "an offset beyond the file": (set_at(*BLOCK, "offset", value=2**40), "offsets"),
    "a misaligned offset": (set_at(*BLOCK, "offset", value=4097), "offset"),
    "two blocks in one place": (lambda d: set_at(*BLOCK, "offset", value=half(d)["offset"])(d), "offsets"),
    "a shard twice": (lambda d: d["shards"].append(d["shards"][1]), "shards"),
    "a shard missing": (remove("shards", 1), "shards"),
    "another world size": (set_at("world_size", value=3), "shards"),
    "a missing field": (remove("shards", 1, "sha256"), "sha256"),
    "a field of another type": (set_at("shards", 1, "nbytes", value="100"), "nbytes"),
    "a bool for a number": (set_at("step", value=True), "step"),
    "another step": (set_at("step", value=7), "step"),
    "another format": (set_at("format", value="other"), "format"),
    "an unknown dtype": (set_at("arrays", "master", "dtype", value="|O"), "dtype"),
    "a path upwards": (set_at("shards", 1, "path", value="../step_00000002/rank00001.h5"), "path"),
    "an absolute path": (set_at("shards", 1, "path", value="/etc/passwd"), "path"),
    "another rank's path": (set_at("shards", 1, "path", value="rank00000.h5"), "path"),
    "a block of no array": (lambda d: d["shards"][1]["blocks"].update(other=[half(d)]), "arrays"),
    "an index beyond the space": (set_at("index", value={"w": {"start": 1000, "shape": [5, 2]}}), "index"),
}  # fmt: skip


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_tampered_manifest_is_refused_by_field_before_any_array_is_touched(comm, shared_path):
    root = shared_path / "c"
    save(root, comm, 1)
    path = step_dir(root, 1) / "manifest.json"
    original, text = manifest_of(root, 1), path.read_text()
    meet(comm)

    def refused(name: str, kind: type[InvalidManifest], word: str) -> None:
        with Checkpointer(root, comm, read_only=True) as checkpointer:
            target = state(comm, None)
            error = raised(comm, kind, lambda: checkpointer.restore(target, verify="none"))
            assert untouched(target), name
            assert word in str(error), f"{name}: {error}"
            assert str(path) in str(error), name

    for name, (change, field) in TAMPERED.items():
        document = copy.deepcopy(original)
        change(document)
        on_one(comm, lambda document=document: write_manifest(root, 1, document))
        refused(name, InvalidManifest, field)
    newer = original | {"schema_version": 2, "shards": "something else entirely"}
    on_one(comm, lambda: write_manifest(root, 1, newer))
    refused("a newer schema", UnknownSchema, "schema_version 2")
    with Checkpointer(root, comm) as checkpointer:  # a newer version's step is not damaged
        raised(comm, UnknownSchema, lambda: checkpointer.restore(state(comm, None), on_damage="older"))
    for name, other in {
        "a digit flipped": text.replace('"step":1', '"step":3'),
        "a digit of wall clock": text.replace('"wall_clock_seconds":0', '"wall_clock_seconds":1'),
        "cut short": text[:-5],
        "nothing": "",
        "no object": "[]",
        "a key twice": text.replace('"format":', '"format":"mpi_ckpt","format":'),
        "NaN": text.replace('"meta":{}', '"meta":NaN'),
    }.items():
        assert other != text, name
        on_one(comm, lambda other=other: path.write_text(other))
        refused(name, InvalidManifest, "manifest")
    on_one(comm, lambda: path.write_bytes(b"\xff" + text.encode()))
    refused("no UTF-8", InvalidManifest, "UTF-8")
    on_one(comm, lambda: write_manifest(root, 1, original | {"added later": 1}))
    with Checkpointer(root, comm, read_only=True) as checkpointer:
        target = state(comm, None)
        assert checkpointer.restore(target).step == 1
        assert holds(target, comm, 1)


# -- choice of the step ----------------------------------------------------------------------------------------------


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_no_checkpoint_is_none_a_missing_step_is_an_error_and_junk_is_neither(comm, shared_path):
    root = shared_path / "c"

    def litter() -> None:
        for name in ("step_5", "step_0000000x", "step_00000999", "step_00000998", "other"):
            (root / name).mkdir(parents=True)
        (root / "step_00000998" / "rank00000.h5").write_bytes(b"half")
        (root / "step_00000998" / "manifest.json.tmp").write_text("{")
        (root / "step_00000997").write_text("a file")
        (root / "step_00000996").symlink_to("step_00000001")
        (root / "step_5" / "manifest.json").write_text("{}")
        (root / "manifest.json").write_text("{}")

    with Checkpointer(root, comm, read_only=True) as checkpointer:  # not even the directory exists
        assert checkpointer.restore(state(comm, None)) is None
        assert (checkpointer.all_steps(), checkpointer.latest_step()) == ([], None)
    assert not root.exists()
    with Checkpointer(root, comm) as checkpointer:
        assert checkpointer.restore(state(comm, None)) is None
        error = raised(comm, NoCheckpoint, lambda: checkpointer.restore(state(comm, None), 0))
        assert str(root) in str(error)
    on_one(comm, litter)
    with Checkpointer(root, comm, keep=None) as checkpointer:
        target = state(comm, None)
        assert checkpointer.restore(target) is None
        assert untouched(target)
        for step in (999, 998, 997, 996, 5):
            raised(comm, NoCheckpoint, lambda step=step: checkpointer.restore(state(comm, None), step))
        for step in (100, 9, 10, 1):
            checkpointer.save(step, state(comm, step), meta={"step": step})
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 9, 10, 100]
        assert checkpointer.latest_step() == 100
        for step in (100, 10, 1):
            target = state(comm, None)
            found = checkpointer.restore(target, None if step == 100 else step)
            assert (found.step, found.meta, found.manifest.step) == (step, {"step": step}, step)
            assert holds(target, comm, step)
        error = raised(comm, NoCheckpoint, lambda: checkpointer.restore(state(comm, None), 2, on_damage="older"))
        assert "1, 9, 10, 100" in str(error)
    leftovers = {path.name for path in root.iterdir()}
    assert {"step_5", "step_0000000x", "other", "step_00000997", "step_00000996", "manifest.json"} <= leftovers
    assert "step_00000998" not in leftovers, "the next writer cleans what was never committed"
    assert (root / "step_5" / "manifest.json").exists(), "what is not ours stays"


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_the_order_in_which_a_directory_lists_its_files_does_not_matter(comm, shared_path, monkeypatch):
    root = shared_path / "c"
    save(root, comm, 9, 10, 100)
    real = os.scandir

    class Backwards:
        def __init__(self, path) -> None:
            with real(path) as entries:
                self._entries = sorted(entries, key=lambda entry: entry.name, reverse=comm.rank == 0)

        def __enter__(self):
            return iter(self._entries)

        def __exit__(self, *error) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    with Checkpointer(root, comm, keep=2) as checkpointer:
        target = state(comm, None)
        assert checkpointer.restore(target).step == 100
        assert holds(target, comm, 100)
        checkpointer.save(101, state(comm, 101))
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps()[-2:] == [100, 101]
        assert 9 not in checkpointer.all_steps()


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_save_before_a_later_step_says_that_a_restart_will_take_the_later_one(comm, shared_path, caplog):
    root = shared_path / "c"
    save(root, comm, 1, 5)
    with Checkpointer(root, comm, keep=None) as checkpointer, caplog.at_level(logging.WARNING):
        checkpointer.save(2, state(comm, 2))
        checkpointer.wait_until_finished()
        said = [record.getMessage() for record in caplog.records]
        assert said == (
            ["step 2 is saved while step 5 is there, which a restart would take: see `discard_after`"]
            if comm.rank == 0
            else []
        )
        checkpointer.discard_after(2)
        checkpointer.save(3, state(comm, 3))
        checkpointer.wait_until_finished()
        assert len(caplog.records) == len(said)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_committed_step_is_saved_again_only_when_asked_and_later_steps_are_discarded_when_asked(comm, shared_path):
    root = shared_path / "c"
    with Checkpointer(root, comm, keep=None) as checkpointer:
        for step in (1, 2, 3, 20, 100):
            checkpointer.save(step, state(comm, step))
        error = raised(comm, StepExists, lambda: checkpointer.save(2, state(comm, 7)))
        assert str(step_dir(root, 2)) in str(error)
        checkpointer.save(2, state(comm, 7), overwrite=True)
        target = state(comm, None)
        checkpointer.restore(target, 2)
        assert holds(target, comm, 7)
        listed = {shard["path"] for shard in manifest_of(root, 2)["shards"]} | {"manifest.json"}
        assert {path.name for path in step_dir(root, 2).iterdir()} == listed, "no file of the old content is left"
        mine = 3 if comm.rank else 4

        def apart() -> None:
            checkpointer.save(mine, state(comm, 7), overwrite=True)
            checkpointer.wait_until_finished()

        error = raised(comm, SaveFailed, apart)
        assert "steps 3, 4" in str(error)
        target = state(comm, None)
        checkpointer.restore(target, 3)
        assert holds(target, comm, 3), "a rank that was elsewhere wrote into another step"
        assert checkpointer.discard_after(3) == [100, 20]
        assert checkpointer.all_steps() == [1, 2, 3]
        assert not step_dir(root, 100).exists()
        assert checkpointer.discard_after(3) == []
        checkpointer.save(20, state(comm, 21))  # the number is free again
        assert checkpointer.discard_after(0) == [20, 3, 2, 1]
        assert checkpointer.restore(state(comm, None)) is None


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_read_only_checkpointer_restores_beside_a_writer_and_changes_nothing(comm, shared_path):
    root = shared_path / "c"

    def everything() -> dict[str, Any]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*"))}

    with Checkpointer(root, comm) as writer:
        for step in (1, 2):
            writer.save(step, state(comm, step))
        writer.wait_until_finished()
        on_one(comm, lambda: flip(shard_file(root, 2, 1), -1))
        before = everything()
        with Checkpointer(root, comm, read_only=True) as reader:
            target = state(comm, None)
            assert reader.restore(target, on_damage="older").step == 1
            assert holds(target, comm, 1)
            for action in (lambda: reader.save(3, state(comm, 3)), lambda: reader.discard_after(0)):
                error = raised(comm, CheckpointError, action)
                assert "read-only" in str(error)
            assert reader.all_steps() == [1, 2], "it sets nothing aside"
        assert everything() == before
        meet(comm)  # before the writer lets go of its lock


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_damaged_newest_step_is_an_error_or_set_aside_for_an_older_one_and_never_a_fresh_start(
    comm, shared_path, caplog
):
    root = shared_path / "c"
    save(root, comm, 1, 2, 3, 4)
    on_one(comm, lambda: flip(shard_file(root, 4, 2), -1))
    on_one(comm, lambda: shard_file(root, 3, 1).unlink())
    with Checkpointer(root, comm, keep=None) as checkpointer, caplog.at_level(logging.WARNING):
        raised(comm, CorruptShard, lambda: checkpointer.restore(state(comm, None)))
        assert checkpointer.all_steps() == [1, 2, 3, 4], "an error changes nothing"
        target = state(comm, None)
        assert checkpointer.restore(target, on_damage="older").step == 2
        assert holds(target, comm, 2)
        assert checkpointer.all_steps() == [1, 2]
        said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
        assert len(said) == (2 if comm.rank == 0 else 0)
        assert comm.rank or ("step_00000004" in said[0] and "rank00002.h5" in said[0] and "rank00001.h5" in said[1])
        for step in (3, 4):
            assert (step_dir(root, step) / "manifest.damaged.json").exists()
            raised(comm, NoCheckpoint, lambda step=step: checkpointer.restore(state(comm, None), step))
        checkpointer.save(3, state(comm, 33))  # the number is free again
        target = state(comm, None)
        assert checkpointer.restore(target).step == 3
        assert holds(target, comm, 33)
        assert not (step_dir(root, 3) / "manifest.damaged.json").exists()
        on_one(comm, lambda: flip(step_dir(root, 2) / "manifest.json", 10))
        raised(comm, InvalidManifest, lambda: checkpointer.restore(state(comm, None), 2, on_damage="older"))
        assert checkpointer.all_steps() == [1, 2, 3], "a step that was asked for by number is never replaced by another"
        for step in (1, 3):
            on_one(comm, lambda step=step: next(step_dir(root, step).glob("rank00000*.h5")).unlink())
        error = raised(comm, NoCheckpoint, lambda: checkpointer.restore(state(comm, None), on_damage="older"))
        assert "no intact step" in str(error)
    for on_damage in ("raise", "older"):
        with Checkpointer(root, comm) as checkpointer:  # the next launch
            target = state(comm, None)
            error = raised(
                comm, NoCheckpoint, lambda target=target, how=on_damage: checkpointer.restore(target, on_damage=how)
            )
            assert "1, 2, 3, 4" in str(error)
            assert untouched(target)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_file_that_the_disk_cannot_read_is_damage_to_a_restore_and_to_retention(comm, shared_path, monkeypatch):
    root = shared_path / "c"
    save(root, comm, 1, 2)
    genuine = os.preadv

    def failing(fd: int, *args: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("step_00000002/rank00001.h5"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return genuine(fd, *args)

    monkeypatch.setattr(os, "preadv", failing)
    with Checkpointer(root, comm, keep=2) as checkpointer:
        error = raised(comm, CorruptShard, lambda: checkpointer.restore(state(comm, None)))
        assert error.rank == 1
        assert "rank00001.h5" in error.path
        assert f"[Errno {errno.EIO}]" in str(error)
        checkpointer.save(3, state(comm, 3))  # what survives is read first: step 2 cannot be, so step 1 stays
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 3]
        target = state(comm, None)
        assert checkpointer.restore(target, 1).step == 1
        assert holds(target, comm, 1)


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_save_right_after_a_restore_holds_the_bytes_of_its_source(comm, shared_path):
    root = shared_path / "c"
    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(1, state(comm, 1))
        target = state(comm, None)
        checkpointer.restore(target)
        checkpointer.save(2, target)
    (first, second) = (manifest_of(root, step)["shards"][comm.rank] for step in (1, 2))
    assert first["blocks"] == second["blocks"], "the checksums of all data included"
    assert first["values"] == second["values"]
    assert first["sha256"] != second["sha256"], "the step itself is part of the file"


# -- a checkpoint of old ---------------------------------------------------------------------------------------------


@pytest.mark.mpi(ranks=[1, 2, 3], timeout=60, unit="s")
def test_the_golden_checkpoint_of_schema_1_restores_for_ever_on_any_number_of_ranks(comm):
    expected = v1_state.state(comm.rank, comm.size)
    target = v1_state.state(comm.rank, comm.size)
    leaves = walk(target)
    for array in (*leaves.arrays.values(), *(s.array for shards in leaves.shards.values() for s in shards)):
        array[...] = -1
    target["values"], target["own"].value = None, None
    target["rng"].value, target["shared rng"] = v1_state.generator(99), v1_state.twister(99)
    world_size = "same" if comm.size == 2 else "any"
    with Checkpointer(GOLDEN, comm, read_only=True) as checkpointer:
        found = checkpointer.restore(target, world_size=world_size)
    assert (found.step, found.meta, dict(found.manifest.metrics)) == (v1_state.STEP, v1_state.META, v1_state.METRICS)
    assert {name: (entry.start, entry.shape) for name, entry in found.manifest.index.items()} == v1_state.INDEX
    assert same_bits(target["optimizer"]["param"].array, expected["optimizer"]["param"].array)
    assert same_bits(target["optimizer"]["t"], expected["optimizer"]["t"])
    assert same_bits(target["grid"].array, expected["grid"].array)
    assert same_bits(target["mask"], expected["mask"])
    assert exact(target["values"]) == exact(v1_state.VALUES)
    assert target["shared rng"].getstate() == expected["shared rng"].getstate()
    of_old_ranks = [{"rank": 0}, {"rank": 1}]
    assert target["own"].value == (of_old_ranks[comm.rank] if comm.size == 2 else of_old_ranks)
    old = v1_state.generator(comm.rank % 2)
    assert target["rng"].value.bit_generator.state == old.bit_generator.state
    assert target["rng"].value.integers(1000, dtype=np.int32) == old.integers(1000, dtype=np.int32)
    sizes = [path.stat().st_size for path in step_dir(GOLDEN, v1_state.STEP).iterdir()]
    assert len(sizes) == 3
    assert sum(sizes) < 100_000
