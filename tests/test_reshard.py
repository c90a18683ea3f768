"""From any number of ranks and any decomposition to any other: every element in its place, to the bit."""

from __future__ import annotations

import itertools
from typing import Any

import h5py
import numpy as np
import pytest

from mpi_ckpt import Checkpointer, CorruptShard, LayoutMismatch, PerRank, Shard, WorldSizeMismatch, shard_range
from mpi_ckpt.checkpoint.state import walk
from tests.checkpoints import (
    DTYPES,
    bits,
    counting,
    first_ranks,
    flip,
    holds_on_all_ranks,
    is_poisoned,
    manifest_of,
    on_one,
    poison,
    poisoned,
    raised,
    same_bits,
    shard_file,
)

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and stop on every axis

# -- any tree, any decomposition, any chain --------------------------------------------------------------------------


def cut(shape: tuple[int, ...], pieces: int, rng: np.random.Generator) -> list[Box]:
    """A decomposition: boxes that tile an array, cut one after the other at random places, empty ones among them."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(pieces):
        start, stop = boxes.pop(rng.integers(len(boxes)))
        axis = int(rng.integers(len(shape)))
        at = int(rng.integers(start[axis], stop[axis] + 1))
        lower, upper = list(stop), list(start)
        lower[axis] = upper[axis] = at
        boxes += [(start, tuple(lower)), (tuple(upper), stop)]
    return boxes


MEMORY = [
    np.ascontiguousarray,
    np.asfortranarray,
    lambda array: np.ascontiguousarray(array[::-1])[::-1],
    lambda array: array.astype(array.dtype.newbyteorder(">")),
]


def my_shards(rank: int, size: int, array: np.ndarray, seed: list[int]) -> Shard | list[Shard]:
    """What one of `size` ranks holds of a global array; every rank draws the same decomposition."""
    rng = np.random.default_rng([*seed, size])
    shards = []
    for start, stop in cut(array.shape, int(rng.integers(2 * size)), rng):
        owner, memory = rng.integers(size), MEMORY[rng.integers(len(MEMORY))]
        if owner == rank:
            part = array[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
            shards.append(Shard(memory(part.copy()), start, array.shape))
    if not shards:
        empty = array[(slice(0, 0), *[slice(None)] * (array.ndim - 1))]
        return Shard(empty.copy(), (0,) * array.ndim, array.shape)
    return shards if len(shards) > 1 or rng.integers(2) else shards[0]


def expected(shard: Shard, array: np.ndarray) -> np.ndarray:
    return array[tuple(slice(a, b) for a, b in zip(shard.block.start, shard.block.stop, strict=True))]


def chains():
    """Strategy: three numbers of ranks, a tree of global arrays (key -> shape, dtype), and a seed to cut them by."""
    from hypothesis import strategies as st

    sizes = st.integers(1, 4)
    shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)
    keys = st.sampled_from(["a", "b/c", "b/d", "e/f/g", "param"])
    trees = st.dictionaries(keys, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=4)
    return st.tuples(st.tuples(sizes, sizes, sizes), trees, st.integers(0, 2**32 - 1))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, leaf in flat.items():
        *levels, name = key.split("/")
        parent = tree
        for level in levels:
            parent = parent.setdefault(level, {})
        parent[name] = leaf
    return tree


@pytest.mark.mpi(ranks=[4], timeout=120, unit="s")
def test_any_tree_in_any_decomposition_survives_any_chain_of_numbers_of_ranks(comm, shared_path):
    roots = (shared_path / str(number) for number in itertools.count())

    def chain(example) -> None:
        ranks, tree, seed = example
        root = next(roots)
        arrays = {key: bits(shape, dtype, number) for number, (key, (shape, dtype)) in enumerate(tree.items())}
        for stage, size in enumerate(ranks):
            with first_ranks(comm, size) as part:
                if part is None:
                    continue
                seeds = {key: [seed, stage, number] for number, key in enumerate(arrays)}
                state = nested({key: my_shards(part.rank, size, a, seeds[key]) for key, a in arrays.items()})
                state["replicated"], state["own"] = bits((2, 3), "<f4"), PerRank(None, resize=lambda old, *_: old)
                with Checkpointer(root, part) as checkpointer:
                    if stage:
                        for shards in walk(state).shards.values():
                            for shard in shards:
                                poison(shard.array)
                        poison(state["replicated"])
                        checkpointer.restore(state, world_size="same" if size == ranks[stage - 1] else "any")
                        old = ranks[stage - 1]
                        assert state["own"].value == ([*range(old)] if old != size else part.rank)
                    leaves = walk(state)
                    wrong = [
                        key
                        for key in arrays
                        for s in leaves.shards[key]
                        if not same_bits(s.array, expected(s, arrays[key]))
                    ]
                    wrong += [] if same_bits(state["replicated"], bits((2, 3), "<f4")) else ["replicated"]
                    wrong = part.allgather(wrong)  # an assertion on one rank alone would leave the others in a save
                    assert not any(wrong), f"wrong at stage {stage}, by rank: {wrong}"
                    state["own"].value = part.rank
                    checkpointer.save(stage, state)

    holds_on_all_ranks(comm, chains(), 20, chain)


# -- intervals of the flat parameter space ---------------------------------------------------------------------------

LENGTHS = (1, 2, 3, 7, 57, 1009, 30_080)
WITH_MOMENTS = (3, 57, 30_080)


def flat_state(rank: int, size: int, fill: bool) -> dict[str, Any]:
    """ZeRO-1 shards of arrays of all lengths: fp16 parameters, and an fp32 master that is not their cast."""
    found: dict[str, Any] = {}
    for n in LENGTHS:
        start, stop = shard_range(n, size, rank)
        master = counting((n,), "<f4") + np.float32(0.001)
        whole = {"master": master}
        if n in WITH_MOMENTS:
            whole |= {"param": master.astype("<f2"), "m": -master, "v": master * master}
        found[f"P{n}"] = {
            key: Shard(a[start:stop].copy() if fill else poison(np.full(stop - start, np.nan, a.dtype)), start, n)
            for key, a in whole.items()
        }
    return found


@pytest.mark.mpi(ranks=[12], timeout=120, unit="s")
def test_flat_shards_of_any_length_move_between_any_numbers_of_ranks(comm, shared_path):
    # Growing and shrinking, by factors and not, far beyond the shortest arrays and back, and past ten ranks.
    moves = {1: (2, 8), 2: (3, 4), 3: (2, 5), 4: (8,), 5: (1, 2), 6: (7,), 7: (3, 8), 8: (1, 2, 7), 12: (1, 5)}
    for old, news in moves.items():
        root = shared_path / str(old)
        with first_ranks(comm, old) as part:
            if part is not None:
                with Checkpointer(root, part, async_io=False) as checkpointer:
                    checkpointer.save(1, flat_state(part.rank, old, fill=True))
        for new in news:
            with first_ranks(comm, new) as part:
                if part is None:
                    continue
                target, wanted = flat_state(part.rank, new, fill=False), flat_state(part.rank, new, fill=True)
                with Checkpointer(root, part, read_only=True) as checkpointer:
                    checkpointer.restore(target, world_size="any")
                found, right = walk(target).shards, walk(wanted).shards
                for key, (shard,) in found.items():
                    assert same_bits(shard.array, right[key][0].array), f"{key}, {old} -> {new} ranks"
        if comm.rank == 0:  # nothing is padded, in no file: NumPy's own split says how long each part is
            for n, rank in itertools.product(LENGTHS, range(old)):
                with h5py.File(shard_file(root, 1, rank)) as file:
                    lengths = [len(part) for part in np.array_split(np.arange(n), old)]
                    assert file[f"arrays/P{n}/master"].shape == (lengths[rank],)
                    assert manifest_of(root, 1)["arrays"][f"P{n}/master"]["shape"] == [n]


# -- another grid of ranks, and what is refused ----------------------------------------------------------------------


def tile(comm, rows: int, columns: int, grid: tuple[int, int], fill: bool) -> Shard:
    """My tile of a field on a grid of ranks."""
    row, column = divmod(comm.rank, grid[1])
    (top, bottom), (left, right) = shard_range(rows, grid[0], row), shard_range(columns, grid[1], column)
    part = counting((rows, columns))[top:bottom, left:right]
    return Shard(part.copy() if fill else poisoned(part.shape, "<f8"), (top, left), (rows, columns))


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_the_same_ranks_may_hold_other_tiles_and_damage_in_another_s_file_is_found(comm, shared_path):
    rows, columns, root = 7, 57, shared_path / "c"
    with Checkpointer(root, comm) as checkpointer:
        checkpointer.save(1, {"u": tile(comm, rows, columns, (2, 2), fill=True)})
        for grid in ((4, 1), (1, 4), (2, 2)):
            target = tile(comm, rows, columns, grid, fill=False)
            checkpointer.restore({"u": target})
            assert same_bits(target.array, tile(comm, rows, columns, grid, fill=True).array), grid
        offset = manifest_of(root, 1)["shards"][3]["blocks"]["u"][0]["offset"]
        comm.Barrier()
        on_one(comm, lambda: flip(shard_file(root, 1, 3), offset + 100))
        for grid, verify in itertools.product(((4, 1), (1, 4), (2, 2)), ("full", "quick")):
            target = tile(comm, rows, columns, grid, fill=False)
            error = raised(
                comm,
                CorruptShard,
                lambda target=target, verify=verify: checkpointer.restore({"u": target}, verify=verify),
            )
            assert "rank00003.h5" in str(error)
            assert error.rank == 3
    for size, verify in itertools.product((1, 3), ("full", "quick")):
        with first_ranks(comm, size) as part:
            if part is not None:
                target = tile(part, rows, columns, (size, 1), fill=False)
                with Checkpointer(root, part) as checkpointer:
                    error = raised(
                        part,
                        CorruptShard,
                        lambda target=target, verify=verify, of=checkpointer: of.restore(
                            {"u": target}, verify=verify, world_size="any"
                        ),
                    )
                assert "rank00003.h5" in str(error)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_another_number_of_ranks_is_an_error_until_asked_for_and_values_per_rank_need_a_rule(comm, shared_path):
    root = shared_path / "c"

    def state(part, seed: int, rule=None, rng_rule=None) -> dict[str, Any]:
        start, stop = shard_range(2, part.size, part.rank)
        return {
            "u": Shard(poisoned((stop - start, 3), "<f8"), (start, 0), (2, 3)),
            "n": None if seed else 5,
            "own": PerRank(None if seed else {"rank": part.rank}, resize=rule),
            "rng": PerRank(np.random.default_rng([seed, part.rank]), resize=rng_rule),
        }

    def untouched(target: dict[str, Any], seed: int, rank: int) -> bool:
        fresh = np.random.default_rng([seed, rank]).bit_generator.state
        same = target["rng"].value.bit_generator.state == fresh
        return is_poisoned(target["u"].array) and target["n"] is None and target["own"].value is None and same

    with first_ranks(comm, 2) as part:
        if part is not None:
            with Checkpointer(root, part) as checkpointer:
                checkpointer.save(1, state(part, 0))
    for size in (1, 3, 4):
        with first_ranks(comm, size) as part:
            if part is None:
                continue
            with Checkpointer(root, part) as checkpointer:
                target = state(part, 1)
                error = raised(part, WorldSizeMismatch, lambda t=target, of=checkpointer: of.restore(t))
                assert "2 ranks" in str(error)
                assert f"{size} ranks" in str(error)
                assert "world_size='any'" in str(error)
                assert untouched(target, 1, part.rank)
                for target in (
                    state(part, 1),
                    state(part, 1, lambda old, rank, size: None),
                    state(part, 1, rng_rule=lambda old, rank, size: old[0]),
                    state(part, 1, lambda old, rank, size: None, lambda old, rank, size: "no generator"),
                ):
                    error = raised(
                        part, LayoutMismatch, lambda t=target, of=checkpointer: of.restore(t, world_size="any")
                    )
                    assert "'own'" in str(error) or "'rng'" in str(error)
                    assert untouched(target, 1, part.rank)
                target = state(
                    part,
                    1,
                    lambda old, rank, size: (old, rank, size),
                    lambda old, rank, size: old[rank] if rank < len(old) else np.random.default_rng([9, rank]),
                )
                checkpointer.restore(target, world_size="any")
                assert target["own"].value == ([{"rank": 0}, {"rank": 1}], part.rank, size)
                stream = np.random.default_rng([0 if part.rank < 2 else 9, part.rank])
                assert target["rng"].value.random(3).tolist() == stream.random(3).tolist()
                assert target["n"] == 5
                only = state(part, 1)
                assert checkpointer.restore(only, keys=["u", "n"], world_size="any").step == 1
                assert only["own"].value is None
                assert only["n"] == 5
