"""`diff`: what differs, to the bit, whoever saved the two steps."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpi_ckpt.layout import Block
from mpi_ckpt.storage.manifest import ArrayRecord
from mpi_ckpt.storage.shard_file import BlockToWrite
from mpi_ckpt.tools import source
from mpi_ckpt.tools.writing import NewStep, write_step
from tests.checkpoints import DTYPES, bits
from tests.programs.tool_states import INDEX, arrays
from tests.tool_cases import copy_of_run, flip_in_array, verb


def save(root, step, found, *, splits=(), index=None, values=None, meta=None):
    """A step of the arrays `found` (a dict), the first axis of each cut at `splits`, written by one process."""
    bounds = [0, *splits]

    def contents(rank):
        blocks = []
        for key, array in found.items():
            if array.ndim == 0:
                blocks += [] if rank else [BlockToWrite(key, array, Block((), ()), ())]
                continue
            last = rank + 1 == len(bounds)
            part = array[bounds[rank] : None if last else bounds[rank + 1]]
            start = min(bounds[rank], len(array))
            blocks.append(BlockToWrite(key, part, Block((start,) + (0,) * (array.ndim - 1), part.shape), array.shape))
        return blocks, {"per_rank": {}} | ({} if rank else {"replicated": values or {}})

    records = {key: ArrayRecord(a.dtype.newbyteorder("<").str, a.shape) for key, a in found.items()}
    new = NewStep(step, len(bounds), 0, records, contents, index=index or {}, meta=meta or {})
    return write_step(root, new)


def differences(*arguments):
    said = verb("diff", *arguments, "--json")
    found = {(each["kind"], each["name"]): each for each in said.json["differences"]}
    assert said.json["equal"] == (not found) == (said.status == 0)
    return found


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


@pytest.mark.parametrize("window", [source.WINDOW_BYTES, 40])
def test_two_steps_of_a_run_differ_exactly_where_numpy_says(run, monkeypatch, window):
    monkeypatch.setattr(source, "WINDOW_BYTES", window)
    found = differences(f"{run}:10", run / "checkpoints" / "step_00000020")
    one, other = arrays(10), arrays(20)
    changed = {}
    for key in one:
        a, b = np.atleast_1d(one[key]), np.atleast_1d(other[key])
        unequal = np.array([x.tobytes() != y.tobytes() for x, y in zip(a.flat, b.flat, strict=True)], bool)
        if unequal.any():
            changed[key] = unequal
            entry = found["array", key]
            assert (entry["differing"], entry["of"]) == (unequal.sum(), unequal.size)
            first = [int(i) for i in np.unravel_index(np.flatnonzero(unequal)[0], one[key].shape)]
            assert entry["first_index"] == first
    assert {name for kind, name in found if kind == "array"} == changed.keys() == one.keys() - {"empty"}
    for key in ("param", "master", "m"):
        for name, (start, shape) in INDEX.items():
            count = int(changed[key][start : start + int(np.prod(shape, dtype=int))].sum())
            if count:
                assert found["parameter", f"{key}:{name}"]["differing"] == count
            else:
                assert ("parameter", f"{key}:{name}") not in found
    others = {pair for pair in found if pair[0] not in ("array", "parameter")}
    ranks = {("value", f"{key} of rank {rank}") for key in ("own", "rng") for rank in range(4)}
    assert others == ranks | {("value", "progress"), ("meta", "cursor"), ("metric", "loss")}
    only = differences(f"{run}:10", f"{run}:20", "--only-arrays")
    assert only.keys() == found.keys() - others


def test_a_step_equals_itself_by_whatever_name(run):
    for name in (run, f"{run}:30", run / "checkpoints", f"{run / 'checkpoints'}:30"):
        said = verb("diff", run / "checkpoints" / "step_00000030", name)
        assert (said.status, said.out.split()[0]) == (0, "equal:")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_bit_is_found_whatever_the_dtype_and_the_decompositions(tmp_path, dtype):
    one = bits((57, 7), dtype)
    other = one.copy()
    raw = other.view(np.uint8).reshape(57, 7, -1)
    raw[43, 5, 0] ^= 1
    save(tmp_path / "a", 1, {"x": one}, splits=(7, 7, 30))
    save(tmp_path / "b", 2, {"x": other}, splits=(44, 60))
    found = differences(tmp_path / "a", tmp_path / "b")
    assert found.keys() == {("array", "x")}
    assert found["array", "x"]["differing"] == 1
    assert found["array", "x"]["first_index"] == [43, 5]


def test_nan_equals_itself_and_zero_is_not_minus_zero(tmp_path):
    save(tmp_path / "a", 1, {"x": np.array([np.nan, 0.0, 1.0, 2.0])})
    save(tmp_path / "b", 1, {"x": np.array([np.nan, -0.0, 1.0, np.nan])})
    found = differences(tmp_path / "a", tmp_path / "b")["array", "x"]
    assert (found["differing"], found["nonfinite"], found["first_index"]) == (2, 1, [1])
    assert (found["max_abs"], found["max_rel"]) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "max_abs", "max_rel"),
    [
        ("<f2", [1, 2], [1.5, 2], 0.5, 1 / 3),
        ("<f8", [1e308, 1], [-1e308, 1.25], 0.25, 0.2),  # the distance of the first is no finite number
        ("<i8", [2**62, -(2**63)], [2**62 - 3, 2**63 - 1], float(2**64 - 1), 2.0),
        ("<u8", [2**64 - 1], [0], float(2**64 - 1), 1.0),
        ("|i1", [-128], [127], 255, 255 / 128),
        ("?", [True, False], [False, False], 1, 1),
        ("<c16", [3 + 4j], [0], 5, 1),
        ("<c8", [1j], [-1j], 2, 2),
    ],
)
def test_the_largest_distances_are_those_of_exact_arithmetic(tmp_path, dtype, a, b, max_abs, max_rel):
    save(tmp_path / "a", 1, {"x": np.array(a, dtype)})
    save(tmp_path / "b", 1, {"x": np.array(b, dtype)})
    found = differences(tmp_path / "a", tmp_path / "b")["array", "x"]
    assert found["max_abs"] == pytest.approx(max_abs)
    assert found["max_rel"] == pytest.approx(max_rel)


def test_keys_dtypes_and_shapes_that_differ_are_told_in_words(tmp_path):
    save(tmp_path / "a", 1, {"x": np.zeros(7, "<f4"), "y": np.zeros((3, 2)), "only": np.zeros(1)})
    save(tmp_path / "b", 1, {"x": np.zeros(7, "<f2"), "y": np.zeros((2, 3)), "more": np.zeros((0, 2))})
    found = differences(tmp_path / "a", tmp_path / "b")
    told = {name: (entry["a"], entry["b"]) for (_, name), entry in found.items()}
    assert told == {
        "x": ("<f4 [7]", "<f2 [7]"),
        "y": ("<f8 [3, 2]", "<f8 [2, 3]"),
        "only": ("<f8 [1]", "nothing"),
        "more": ("nothing", "<f8 [0, 2]"),
    }


@pytest.mark.parametrize("window", [source.WINDOW_BYTES, 16])
def test_parameters_are_compared_by_name_where_they_lie_elsewhere(tmp_path, monkeypatch, window):
    monkeypatch.setattr(source, "WINDOW_BYTES", window)
    a = np.arange(57.0)
    b = np.concatenate([a[20:57], a[:20]])
    b[40] += 1  # element 3 of `first`
    index_a = {"first": (0, (4, 5)), "second": (20, (37,)), "gone": (0, (1,))}
    index_b = {"first": (37, (4, 5)), "second": (0, (37,))}
    save(tmp_path / "a", 1, {"param": a}, index=index_a, splits=(11,))
    save(tmp_path / "b", 1, {"param": b}, index=index_b, splits=(40, 41))
    found = differences(tmp_path / "a", tmp_path / "b")
    parameters = {name: entry for (kind, name), entry in found.items() if kind == "parameter"}
    assert parameters.keys() == {"first", "gone"}
    assert (parameters["first"]["differing"], parameters["first"]["first_index"]) == (1, [0, 3])
    assert (parameters["gone"]["a"], parameters["gone"]["b"]) == ("<f8 [1]", "nothing")


@pytest.mark.parametrize(
    ("a", "b", "same"), [(1, 1.0, False), (1, True, False), ({"x": 1, "y": 2}, {"y": 2, "x": 1}, True)]
)
def test_values_and_meta_differ_by_type_too_and_not_by_the_order_of_keys(tmp_path, a, b, same):
    save(tmp_path / "a", 1, {}, values={"v": a}, meta={"m": a})
    save(tmp_path / "b", 1, {}, values={"v": b}, meta={"m": b})
    assert (differences(tmp_path / "a", tmp_path / "b") == {}) == same


def test_a_damaged_chunk_is_an_error_and_no_difference(run):
    damaged = flip_in_array(run / "checkpoints", 20, 1, "master")
    said = verb("diff", f"{run}:20", f"{run}:30")
    assert (said.status, said.out) == (1, "")
    assert str(damaged) in said.err


def test_the_list_for_people_is_short_unless_all_is_asked_for(tmp_path):
    index = {f"layer{i}.weight": (7 * i, (7,)) for i in range(30)}
    for place, value in (("a", 0.0), ("b", 1.0)):
        save(tmp_path / place, 1, {"param": np.full(210, value)}, index=index)
    short = verb("diff", tmp_path / "a", tmp_path / "b").out
    assert short.count("parameter ") == 8
    assert "22 more parameters differ (--all)" in short
    assert verb("diff", tmp_path / "a", tmp_path / "b", "--all").out.count("parameter ") == 30
    assert len(json.loads(verb("diff", tmp_path / "a", tmp_path / "b", "--json").out)["differences"]) == 31
