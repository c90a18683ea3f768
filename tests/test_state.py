"""The leaves of a state: any array comes back to the bit, in place; what cannot is refused at save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpi_ckpt import Checkpointer, LayoutMismatch, PerRank, SaveFailed, Shard, UnsupportedState, shard_range
from mpi_ckpt.checkpoint.state import walk
from tests.checkpoints import DTYPES, bits, is_poisoned, poison, poisoned, raised, same_bits, shard_file, step_dir

ROWS, COLUMNS = 7, 5


def swapped(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder(">"))


def offset_by_one_byte(array: np.ndarray) -> np.ndarray:
    """The same values at an address that no element may have."""
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    found = raw.view(array.dtype).reshape(array.shape) if array.size else array.copy()
    found[...] = array
    return found


def every_other(array: np.ndarray) -> np.ndarray:
    wide = poisoned((2 * array.shape[0], 3 * array.shape[1]), array.dtype)
    wide[::2, 1::3] = array
    return wide[::2, 1::3]


def read_only(array: np.ndarray) -> np.ndarray:
    found = array.copy()
    found.flags.writeable = False
    return found


# The same values in every kind of memory that NumPy knows.
FORMS: dict[str, Any] = {
    "contiguous": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "transposed": lambda array: np.ascontiguousarray(array.T).T,
    "reversed": lambda array: np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1],
    "strided": every_other,
    "big-endian": swapped,
    "big-endian and strided": lambda array: every_other(swapped(array)),
    "misaligned": offset_by_one_byte,
    "read-only": read_only,
}


def my_rows(comm, array: np.ndarray) -> tuple[np.ndarray, int]:
    start, stop = shard_range(len(array), comm.size, comm.rank)
    return array[start:stop], start


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_any_memory_is_saved_in_c_order_and_restored_in_place_into_any_memory(comm, shared_path):
    root = shared_path / "c"
    values = {dtype: bits((ROWS, COLUMNS), dtype) for dtype in DTYPES}
    mine = {dtype: my_rows(comm, array) for dtype, array in values.items()}

    def state(form) -> dict:
        return {
            f"{dtype} {name}": {
                "shard": Shard(make(form(part)), (start, 0), (ROWS, COLUMNS)),
                "replicated": make(form(values[dtype])),
            }
            for dtype, (part, start) in mine.items()
            for name, make in FORMS.items()
        }

    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(1, state(lambda array: array))
        checkpointer.wait_until_finished()
        for make in map(FORMS.get, ("contiguous", "Fortran", "reversed", "big-endian and strided", "misaligned")):
            target = {
                f"{dtype} {name}": {
                    "shard": Shard(make(poisoned(part.shape, dtype)), (start, 0), (ROWS, COLUMNS)),
                    "replicated": make(poisoned((ROWS, COLUMNS), dtype)),
                }
                for dtype, (part, start) in mine.items()
                for name in FORMS
            }
            checkpointer.restore(target)
            for key, pair in target.items():
                dtype = key.split()[0]
                assert same_bits(pair["shard"].array, mine[dtype][0]), key
                assert same_bits(pair["replicated"], values[dtype]), key
    with h5py.File(shard_file(root, 1, comm.rank)) as file:
        for dtype, (part, start) in mine.items():
            for name in FORMS:
                dataset = file[f"arrays/{dtype} {name}/shard"]
                assert dataset[...].tobytes() == part.tobytes(), f"{dtype} {name}: not little-endian in C order"
                assert dataset.attrs["start"].tolist() == [start, 0]
                assert dataset.attrs["global_shape"].tolist() == [ROWS, COLUMNS]
                assert (f"arrays/{dtype} {name}/replicated" in file) == (comm.rank == 0), "stored once, by rank 0"


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_restore_leaves_the_memory_between_strided_elements_alone(comm, shared_path):
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        start, stop = shard_range(ROWS, comm.size, comm.rank)
        values = bits((ROWS, COLUMNS), "<f4")
        broadcast = np.broadcast_to(np.arange(COLUMNS, dtype="<f4"), (stop - start, COLUMNS))
        saved = {
            "a": Shard(values[start:stop], (start, 0), values.shape),
            "b": Shard(broadcast, (start, 0), values.shape),
        }
        checkpointer.save(1, saved)
        wide = poisoned((2, 3 * (stop - start), 2 * COLUMNS), "<f4")
        holes = np.ones(wide.shape, bool)
        holes[:, ::3, 1::2] = False
        target = {key: Shard(wide[i, ::3, 1::2], (start, 0), values.shape) for i, key in enumerate("ab")}
        checkpointer.restore(target)
        assert same_bits(target["a"].array, values[start:stop])
        assert same_bits(target["b"].array, np.ascontiguousarray(broadcast))
        assert is_poisoned(wide[holes])


@pytest.mark.mpi(ranks=[1, 4], timeout=60, unit="s")
def test_zero_dimensions_zero_sizes_and_no_state_at_all_come_back(comm, shared_path):
    shapes = [(0,), (0, 4), (4, 0), (3, 0, 2), (1,), (2, 3)]  # fewer elements than ranks: some hold none

    def state(make) -> dict[str, Any]:
        found: dict[str, Any] = {"nested": {}}
        for shape in shapes:
            start, stop = shard_range(shape[0], comm.size, comm.rank)
            part = make(shape)[start:stop]
            found[f"sharded {shape}"] = Shard(part, (start, *[0] * (len(shape) - 1)), shape)
            found["nested"][f"replicated {shape}"] = make(shape)
        found["counter"], found["truth"], found["big"] = make(()), make((), "?"), swapped(make(()))
        return found

    with Checkpointer(shared_path / "c", comm) as checkpointer:
        checkpointer.save(1, {})
        assert checkpointer.restore({}).step == 1
        checkpointer.save(2, state(lambda shape, dtype="<f8": bits(shape, dtype)))
        target = state(lambda shape, dtype="<f8": poisoned(shape, dtype))
        held = target["counter"]
        checkpointer.restore(target)
        assert target["counter"] is held, "a 0-d array is filled in place, not replaced"
        for key, leaf in walk(target).arrays.items():
            assert same_bits(leaf, bits(leaf.shape, leaf.dtype.newbyteorder("<"))), key
        for key, (shard,) in walk(target).shards.items():
            start = shard.block.start[0]
            assert same_bits(shard.array, bits(shard.shape, "<f8")[start : start + len(shard.array)]), key


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_rank_may_hold_several_blocks_of_an_array_or_one_or_an_empty_one(comm, shared_path):
    total = 57
    edges = [0, 1, 8, 8, 20, 41, 57]  # blocks 0..5, one of them empty
    whole = bits((total, 3), "<f4")
    owners = {0: [5, 0, 2], 1: [4, 1], 2: [3]}[comm.rank]  # not in the order of the array

    def state(make) -> dict[str, Any]:
        shards = [Shard(make(whole[edges[i] : edges[i + 1]]), (edges[i], 0), whole.shape) for i in owners]
        nothing = Shard(make(whole[:0]), (comm.rank, 0), whole.shape)
        everything = Shard(make(whole), (0, 0), whole.shape)
        return {
            "list": shards,
            "tuple": tuple(shards) if len(shards) > 1 else shards[0],
            "one rank": everything if comm.rank == 1 else nothing,
        }

    with Checkpointer(shared_path / "c", comm) as checkpointer:
        checkpointer.save(1, state(np.copy))
        target = state(lambda array: poison(array.copy()))
        checkpointer.restore(target)
        for key, shards in walk(target).shards.items():
            for shard in shards:
                start, stop = shard.block.start[0], shard.block.stop[0]
                assert same_bits(shard.array, whole[start:stop]), key


def block(comm, shape: tuple[int, ...] = (8,), dtype: Any = "<f4", *, first: int | None = None) -> Shard:
    start, stop = shard_range(shape[0], comm.size, comm.rank)
    return Shard(
        np.zeros((stop - start, *shape[1:]), dtype), (start if first is None else first, *[0] * len(shape[1:])), shape
    )


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_states_that_do_not_fit_together_are_refused_on_every_rank_before_a_byte_is_written(comm, shared_path):
    root, odd = shared_path / "c", comm.rank == 2

    def differing(normal: Any, other: Any) -> dict[str, Any]:
        return {"ok": block(comm), "x": other if odd else normal}

    mistakes = {
        "a key missing on one rank": {"ok": block(comm)} | ({} if odd else {"x": 1}),
        "an array missing on one rank": {"ok": block(comm)} | ({} if odd else {"x": block(comm)}),
        "a key on one rank only": {"ok": block(comm)} | ({"x": PerRank(1)} if odd else {}),
        "another dtype": differing(block(comm), block(comm, dtype="<f8")),
        "another global shape": differing(block(comm), block(comm, (9,))),
        "another number of axes": differing(block(comm), block(comm, (8, 1))),
        "sharded here, replicated there": differing(block(comm), np.zeros(8, "<f4")),
        "array here, value there": differing(np.zeros(2), [0.0, 0.0]),
        "value here, value per rank there": differing(1, PerRank(1)),
        "another value": differing({"a": [1.0]}, {"a": [1.5]}),
        "0.0 and -0.0": differing(0.0, -0.0),
        "1 and True": differing(1, True),
        "another replicated array": differing(np.zeros(3), np.array([0.0, 0.0, -0.0])),
        "another shape of a replicated array": differing(np.zeros((3, 2)), np.zeros((2, 3))),
        "a gap": {"x": block(comm, (8,), first=0) if comm.rank == 0 else block(comm, (8,), first=6)},
        "an overlap": differing(block(comm), block(comm, first=3)),
        "generators apart": {"x": np.random.default_rng(comm.rank)},
    }
    with Checkpointer(root, comm) as checkpointer:
        for name, state in mistakes.items():
            error = raised(comm, LayoutMismatch, lambda state=state: checkpointer.save(1, state))
            assert "'x'" in str(error), name
            assert not list(root.glob("step_*")), name
        checkpointer.save(1, {"ok": block(comm)})
        assert checkpointer.latest_step() == 1 or checkpointer.wait_until_finished() is None


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_state_that_no_file_can_hold_is_refused_at_save_though_it_is_written_later(comm, shared_path):
    root, odd = shared_path / "c", comm.rank == 1
    refused = {
        "objects": np.array([None, 1]),
        "strings": np.array(["a"]),
        "dates": np.array(["2026-01-01"], "M8[D]"),
        "structured": np.zeros(2, [("a", "i4")]),
        "long double": np.zeros(2, np.longdouble),
        "masked": np.ma.array([1.0, 2.0], mask=[False, True]),
        "33 axes": np.zeros((1,) * 33),
    }
    with Checkpointer(root, comm) as checkpointer:
        for array in refused.values():
            whole = Shard(array, (0,) * array.ndim, array.shape)
            for leaf in (whole, [whole], array, {"deep": {"er": whole}}):
                error = raised(
                    comm, UnsupportedState, lambda leaf=leaf: checkpointer.save(1, {"x": leaf if odd else 0})
                )
                assert error.rank == 1
                assert "'x" in str(error)
        for key in ("", "a/b", ".", "..", "a\0", "a\nb", "\ud800", 1, None, ("a",)):
            state = {"ok": {key: np.zeros(1)}} if odd else {"ok": {"x": np.zeros(1)}}
            error = raised(comm, UnsupportedState, lambda state=state: checkpointer.save(1, state))
            assert repr(key) in str(error)
        raised(comm, UnsupportedState, lambda: checkpointer.save(1, ["no dict"]))  # type: ignore[arg-type]
        assert not list(root.glob("step_*"))
        checkpointer.save(1, {"é ∑": {"with space": np.zeros(2), "a.b": 1}})
        assert checkpointer.restore({"é ∑": {"with space": np.ones(2), "a.b": 2}}).step == 1


def test_a_block_that_leaves_its_global_array_is_refused_where_it_is_made():
    for start, shape in (((-1,), (8,)), ((7,), (8,)), ((0, 0), (8,)), ((0,), (8, 8)), (6, 8)):
        with pytest.raises(LayoutMismatch, match="outside its global array"):
            Shard(np.zeros(3), start, shape)
    with pytest.raises(LayoutMismatch, match=r"'x' belong to different arrays"):
        walk({"x": [Shard(np.zeros(3), 0, 6), Shard(np.zeros(3, "f4"), 3, 6)]})
    with pytest.raises(LayoutMismatch, match=r"'x' belong to different arrays"):
        walk({"x": [Shard(np.zeros(3), 0, 6), Shard(np.zeros(3), 3, 7)]})


def test_nested_dicts_are_walked_as_long_as_there_are_arrays_below_and_values_stay_whole():
    state = {
        "a": {"b": {"array": np.zeros(2), "value": {"x": 1}}, "rng": np.random.default_rng(1)},
        "plain": {"x": {"y": [1]}},
        "empty": {},
        "none": None,
        "own": {"mine": PerRank({"z": 1})},
        "ab": 1,
    }
    leaves = walk(state)
    assert leaves.kinds == {
        "a/b/array": "replicated array",
        "a/b/value": "plain value",
        "a/rng": "plain value",
        "plain": "plain value",
        "empty": "plain value",
        "none": "plain value",
        "own/mine": "value per rank",
        "ab": "plain value",
    }
    assert set(leaves.select(["a/b", "own"]).kinds) == {"a/b/array", "a/b/value", "own/mine"}
    assert set(leaves.select(["a"]).kinds) == {"a/b/array", "a/b/value", "a/rng"}
    assert leaves.select([]).kinds == {}
    with pytest.raises(LayoutMismatch, match="'plain/x'"):
        leaves.select(["plain/x"])


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_an_error_of_the_disk_is_not_the_state_s_fault(comm, shared_path):
    """A step's directory cannot be made: a SaveFailed on all ranks that names the path, not an UnsupportedState."""
    root: Path = shared_path / "c"
    with Checkpointer(root, comm, async_io=False) as checkpointer:
        if comm.rank == 0:
            step_dir(root, 1).write_text("a file where a directory should be")
        comm.Barrier()
        error = raised(comm, SaveFailed, lambda: checkpointer.save(1, {"x": block(comm)}))
        assert str(step_dir(root, 1)) in str(error)
