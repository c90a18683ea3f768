"""Plain values: the same type and the same bits come back, or the save refuses them by name."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_ckpt import Checkpointer, LayoutMismatch, PerRank, UnsupportedState
from mpi_ckpt.checkpoint import snapshot, values
from mpi_ckpt.checkpoint.state import walk
from tests.checkpoints import DTYPES, bits, exact, raised

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


def nan(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


def round_trip(value: Any) -> Any:
    return values.decode(values.loads(values.dumps(values.encode("x", value))))


SCALARS = [
    *(None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**53) - 1, 2**64, -(2**64), 10**4000, -(10**4000)),
    *(0.0, -0.0, 0.1, 5e-324, -5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), float("nan")),
    *(nan(0xFFF8000000000000), nan(0x7FF8000000000123), nan(0x7FF0000000000001)),
    *(1 + 2j, complex(-0.0, 0.0), complex(0.0, -0.0), complex(float("nan"), float("-inf"))),
    *("", "plain", "é ∑ 😀", "\0\n\t\x7f\u2028", "$", '{"$":"int"}', "\ud800", "\ud83d\ude00", "x\udcff"),
    *(b"", b"\0\xff", bytes(range(256)), bytearray(), bytearray(b"\0\xff")),
]
NESTED = [
    *([], (), {}, set(), frozenset(), [[]], ((),), [()], ([],), {"a": {}}),
    *([1, [2, (3, {"four": [5.0, None]})]], {"a": [1, 2], "b": {"c": (1,)}}),
    *({"$": 1}, {"$": "int", "v": "0x1"}, {"a": {"$": "tuple"}}, {"v": 1, "$": 2}),
    *({1: 2, "1": 3}, {None: 1, True: 2, 2.5: 3, (1, "a"): 4, b"k": 5, frozenset({1}): 6}, {"\ud83d\ude00": 1}),
    *({"z": 1, "a": 2}, {float("nan"): 1}, {1, "a", None, (1, 2), 2.5, frozenset({3})}, frozenset({1, (2,)})),
]
NUMPY = [
    *(bits((), dtype)[()] for dtype in DTYPES),
    *(np.float64(0.1), np.float32(0.1), np.float16("nan"), np.bool_(True), np.int64(-1), np.complex64(1j)),
    *(bits(shape, dtype) for dtype in DTYPES for shape in [(), (0,), (0, 4), (3,), (2, 3, 4)]),
    *(bits((3, 2), np.dtype(dtype).newbyteorder(">")) for dtype in DTYPES),
    bits((4, 6), "<f4")[::-1, ::3].T,
    np.broadcast_to(np.float32(1.5), (2, 3)),
]


@pytest.mark.parametrize("group", [SCALARS, NESTED, NUMPY], ids=["scalars", "nested", "numpy"])
def test_the_same_type_and_bits_come_back(group):
    for value in group:
        for held in (value, [value], (value, value), {"k": value}, {1: [value]}):
            assert exact(round_trip(held)) == exact(held), repr(held)[:100]


hashable = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.binary(),
        st.text(st.characters()), st.text(st.characters(codec=None), max_size=4),
        st.sampled_from([value for value in NUMPY if isinstance(value, np.generic)]),
    ),
    lambda inner: st.one_of(st.tuples(inner, inner), st.frozensets(inner, max_size=3)), max_leaves=4,
)  # fmt: skip
trees = st.recursive(
    hashable,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner), st.sets(hashable, max_size=3),
        st.dictionaries(st.text(), inner, max_size=4), st.dictionaries(hashable, inner, max_size=3),
        st.sampled_from([value for value in NUMPY if isinstance(value, np.ndarray)]),
    ), max_leaves=12,
)  # fmt: skip


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(trees)
def test_any_tree_of_them_comes_back(tree):
    assert exact(round_trip(tree)) == exact(tree)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers() | st.text(), unique=True, min_size=2), st.randoms(use_true_random=False))
def test_equal_sets_give_equal_bytes_whatever_their_order(items, shuffler):
    shuffled = list(items)
    shuffler.shuffle(shuffled)
    assert values.dumps(values.encode("x", set(items))) == values.dumps(values.encode("x", set(shuffled)))


def test_what_came_back_belongs_to_the_caller():
    array = round_trip([np.arange(3.0)])[0]
    array += 1
    assert array.tolist() == [1, 2, 3]


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Point = collections.namedtuple("Point", "x y")


def chain(length: int, wrap) -> Any:
    value: Any = 0
    for _ in range(length):
        value = wrap(value)
    return value


def endless(make) -> Any:
    value = make()
    value.append(value) if isinstance(value, list) else value.__setitem__("again", value)
    return value


REFUSED = {
    "a namedtuple": Point(1, 2),
    "an OrderedDict": collections.OrderedDict(a=1),
    "a defaultdict": collections.defaultdict(int),
    "a Counter": collections.Counter("ab"),
    "a deque": collections.deque([1]),
    "an enum": Colour.RED,
    "a subclass of str": Text("a"),
    "a subclass of list": type("List", (list,), {})([1]),
    "a subclass of int": type("Int", (int,), {})(1),
    "a range": range(3),
    "a memoryview": memoryview(b"ab"),
    "a Decimal": decimal.Decimal("0.1"),
    "a Fraction": fractions.Fraction(1, 3),
    "a datetime": datetime.datetime(2026, 1, 1),
    "a function": len,
    "a class": int,
    "an object": object(),
    "np.longdouble": np.longdouble(1),
    "np.clongdouble": np.clongdouble(1),
    "np.str_": np.str_("a"),
    "np.bytes_": np.bytes_(b"a"),
    "np.datetime64": np.datetime64("2026-01-01"),
    "np.void": np.void(b"ab"),
    "an array of objects": np.array([None, 1]),
    "an array of strings": np.array(["a"]),
    "a structured array": np.zeros(2, [("a", "i4")]),
    "a masked array": np.ma.array([1, 2], mask=[False, True]),
    "a list that holds itself": endless(list),
    "a dict that holds itself": endless(dict),
    "a generator without state": random.SystemRandom(),
    "lists deeper than a restore could follow": chain(5000, lambda inner: [inner]),
    "tuples deeper than a restore could follow": chain(330, lambda inner: (inner,)),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_anything_else_is_refused_by_key_and_type_at_any_depth(value):
    for held in (value, [value], (1, value), {"k": value}, {1: value}):
        with pytest.raises(UnsupportedState, match="settings"):
            snapshot.take(walk({"settings": {"x": held}}), rank=0)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {1: inner}])
def test_what_is_nested_deeply_is_refused_or_restored_from_a_deeper_stack(wrap):
    def deeper(levels: int, work) -> Any:
        return work() if levels == 0 else deeper(levels - 1, work)

    saved = 0
    for depth in (1, 10, 50, 100, 150, 200, 250, 300, 350, 400, 450, 500):
        value = chain(depth, wrap)
        try:
            data = values.dumps(values.encode("x", value))
        except UnsupportedState:
            break
        assert repr(deeper(200, lambda data=data: values.decode(values.loads(data)))) == repr(value)
        saved = depth
    assert saved >= 50


def generators(seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{name} {kind.__name__}": kind(getattr(np.random, name)(seed))
        for name in BIT_GENERATORS
        for kind in (np.random.Generator, np.random.RandomState)
    }
    return found | {"random.Random": random.Random(seed)}


def draws(generator: Any) -> list:
    """Draws that depend on everything a generator keeps, a buffered half word and a second Gaussian among it."""
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random(), generator.getrandbits(7), generator.gauss(0, 1)]
    if isinstance(generator, np.random.RandomState):
        return [generator.standard_normal(), *generator.bytes(5), generator.random_sample(), generator.randint(9)]
    return [generator.integers(9, dtype=np.int32), generator.standard_normal(), generator.random()]


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_every_generator_goes_on_where_it_was_on_every_rank(comm, shared_path):
    mine, shared = generators(comm.rank), generators(77)
    for generator in (*mine.values(), *shared.values()):
        draws(generator)  # from the middle of the stream on
    state = {"mine": {name: PerRank(g) for name, g in mine.items()}, "shared": shared}
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        checkpointer.save(1, state)
        expected = [[draws(g) for _ in range(3)] for g in (*mine.values(), *shared.values())]
        checkpointer.wait_until_finished()
        others, others_shared = generators(99), generators(88)
        target = {"mine": {name: PerRank(g) for name, g in others.items()}, "shared": others_shared}
        checkpointer.restore(target)
    assert [[draws(g) for _ in range(3)] for g in (*others.values(), *others_shared.values())] == expected
    by_rank = comm.allgather(repr(expected))
    assert len(set(by_rank)) == comm.size, "every rank has a stream of its own"


def test_a_generator_among_plain_values_is_refused_because_only_a_copy_could_come_back():
    for generator in generators(1).values():
        for held in ([generator], (generator,), {1: [generator]}):
            with pytest.raises(UnsupportedState, match=r"'rngs'.*dict"):
                values.encode("rngs", held)
            with pytest.raises(UnsupportedState, match=r"'rngs/a'"):
                values.encode("rngs", {"a": held})


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_values_come_back_through_files_and_refusals_reach_every_rank(comm, shared_path):
    everything = {"scalars": SCALARS, "nested": NESTED, "numpy": NUMPY, "deep": {"er": {"x": (1, [2])}}, "none": None}
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        checkpointer.save(1, everything | {"own": PerRank([everything, comm.rank])})
        target = dict.fromkeys(everything) | {"own": PerRank(None)}
        checkpointer.restore(target)
        assert exact({key: target[key] for key in everything}) == exact(everything)
        assert exact(target["own"].value) == exact([everything, comm.rank])
        for name, value in REFUSED.items():
            guilty = comm.rank == comm.size - 1
            for held in ({"x": PerRank(value if guilty else 0)}, {"x": value if guilty else 0}):
                error = raised(comm, UnsupportedState, lambda held=held: checkpointer.save(2, held))
                assert error.rank == comm.size - 1, name
        assert checkpointer.all_steps() == [1]
        checkpointer.save(2, everything | {"own": PerRank(None)})


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_generator_is_restored_only_into_one_of_its_kind(comm, shared_path):
    root = shared_path / "c"
    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(1, {"a": np.random.default_rng(1), "b": PerRank(random.Random(1)), "c": 5})
        checkpointer.wait_until_finished()
        for wrong in ({"a": np.random.Generator(np.random.MT19937(1))}, {"a": np.random.RandomState(1)},
                      {"b": PerRank(np.random.default_rng(1))}, {"c": random.Random(1)}):  # fmt: skip
            target = {"a": np.random.default_rng(2), "b": PerRank(random.Random(2)), "c": 0} | wrong
            error = raised(comm, LayoutMismatch, lambda target=target: checkpointer.restore(target))
            assert "generator" in str(error)
            assert target["c"] == 0 or isinstance(target["c"], random.Random), "values changed before all had agreed"
