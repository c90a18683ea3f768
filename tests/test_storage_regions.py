"""Any region of any block: equal to NumPy slicing, and only the chunks that it needs are read and judged."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.layout import Block, overlap
from mpi_ckpt.storage import flat
from mpi_ckpt.storage.shard_file import map_block, read_block, read_blocks
from tests.storage_cases import MIB, bits, flip, same_bits, save_shard, to_write

# A block of each kind: 1-d, wide rows, many axes, small rows; all above 1 MiB and none a multiple of it.
CASES = {
    "line": (bits((1_300_003,), "<f2"), (57,), (2_000_000,)),
    "rows": (bits((5, 300_007), "<f4"), (3, 7), (9, 300_100)),
    "axes": (bits((57, 7, 3, 1009), "<f8"), (0, 1, 2, 3), (57, 8, 5, 1012)),
    "columns": (bits((400_003, 3), "|b1"), (10, 0), (400_013, 3)),
    "scalar": (bits((), "<c16"), (), ()),
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    written = [to_write(key, array, start, shape) for key, (array, start, shape) in CASES.items()]
    return save_shard(tmp_path_factory.mktemp("regions"), written)


@st.composite
def regions(draw):
    """A key and a box of its global array: anywhere, of any extent, empty ones too."""
    key = draw(st.sampled_from(sorted(CASES)))
    start, shape = [], []
    for total in CASES[key][2]:
        a = draw(st.integers(0, total))
        start.append(a)
        shape.append(draw(st.one_of(st.integers(0, min(20, total - a)), st.integers(0, total - a))))
    return key, Block(tuple(start), tuple(shape))


def blank(block: Block, dtype: np.dtype, look: str) -> np.ndarray:
    """An array of the block's shape, filled with a pattern, in one of several memory layouts."""
    out = np.zeros(block.shape, dtype.newbyteorder(">") if look == "swapped" else dtype)
    if look == "fortran":
        out = np.array(out, order="F")
    if look == "strided" and out.ndim:
        out = np.repeat(out, 2, axis=-1)[..., ::2]
    out[...] = 1
    return out


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=regions(), look=st.sampled_from(["plain", "fortran", "strided", "swapped"]), verify=st.booleans())
def test_any_region_equals_numpy_slicing(shard, wanted, look, verify):
    path, record = shard
    key, region = wanted
    array, start, _ = CASES[key]
    (block,) = record.blocks[key]
    out, expected = blank(region, array.dtype, look), blank(region, array.dtype, "plain")
    part = overlap(region, Block(start, array.shape))
    if part is not None:
        expected[part.within(region)] = array[part.within(Block(start, array.shape))]
    nbytes = read_block(path, block, region, out, verify="crc32c" if verify else "none")
    assert same_bits(out, expected)
    assert (nbytes == 0) == (part is None)


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), data=st.data())
def test_boxes_are_the_run_of_elements_in_c_order(shape, data):
    size = int(np.prod(shape))
    lo = data.draw(st.integers(0, size))
    hi = data.draw(st.integers(lo, size))
    numbers = np.arange(size).reshape(shape)
    found = list(flat.boxes(shape, lo, hi))
    whole = Block((0,) * len(shape), shape)
    elements = [n for box in found for n in np.asarray(numbers[box.within(whole)]).ravel()]
    assert elements == list(range(lo, hi))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_only_the_chunks_that_overlap_are_read(shard):
    path, record = shard
    (block,) = record.blocks["line"]
    assert read_block(path, block, Block((57,), (1,)), np.zeros(1, "<f2")) == MIB
    across = Block((57 + MIB // 2 - 1,), (2,))
    assert read_block(path, block, across, np.zeros(2, "<f2")) == 2 * MIB
    last = Block((57 + 1_300_002,), (1,))
    assert read_block(path, block, last, np.zeros(1, "<f2")) == 2 * 1_300_003 - 2 * MIB
    # One column of wide rows lies in each row's chunk, not in those between.
    wide = bits((7, 3 * MIB), "|u1")
    wide_path, wide_record = save_shard(path.parent, [to_write("w", wide)], rank=1)
    out = np.zeros((7, 5), "|u1")
    assert read_block(wide_path, wide_record.blocks["w"][0], Block((0, 9), (7, 5)), out) == 7 * MIB
    assert np.array_equal(out, wide[:, 9:14])


def test_damage_is_found_by_whoever_needs_the_chunk_and_by_nobody_else(tmp_path):
    array = np.arange(5 * MIB // 8 + 57, dtype="<i8")
    path, record = save_shard(tmp_path, [to_write("a", array)])
    (block,) = record.blocks["a"]
    flip(path, block.offset + 2 * MIB + 12345)
    for chunk in range(6):
        region = Block((chunk * MIB // 8 + 3,), (40,))
        out = np.zeros(40, "<i8")
        if chunk != 2:
            read_block(path, block, region, out)
            assert np.array_equal(out, array[region.within(block.block)])
            continue
        with pytest.raises(CorruptShard, match=f"offset {block.offset + 2 * MIB}") as caught:
            read_block(path, block, region, out)
        assert (caught.value.path, caught.value.rank) == (str(path), 0)
        assert caught.value.found.startswith("crc32c")
        assert caught.value.expected.startswith("crc32c")
        read_block(path, block, region, out, verify="none")  # asked not to look


def test_damage_to_the_table_of_checksums_is_found(tmp_path):
    path, record = save_shard(tmp_path, [to_write("a", np.zeros(1009)), to_write("b", np.ones(1009))])
    flip(path, record.blocks["b"][0].table_offset)
    read_block(path, record.blocks["a"][0], Block((0,), (3,)), np.zeros(3))
    with pytest.raises(CorruptShard, match="table of checksums"):
        read_block(path, record.blocks["b"][0], Block((0,), (3,)), np.zeros(3))


def test_several_regions_of_one_file_in_one_call(shard):
    path, record = shard
    array, start, _ = CASES["axes"]
    (block,) = record.blocks["axes"]
    half = [Block((0, 1, 2, 3), (30, 7, 3, 1009)), Block((30, 1, 2, 3), (27, 7, 3, 1009))]
    outs = [np.zeros(region.shape) for region in half]
    read_blocks(path, [(block, region, out) for region, out in zip(half, outs, strict=True)])
    assert same_bits(np.concatenate(outs), array)
    assert start == block.start


def test_every_region_of_a_small_block(tmp_path):
    array = bits((3, 4, 5), "<i4")
    path, record = save_shard(tmp_path, [to_write("a", array, (1, 1, 1), (5, 5, 6))])
    (block,) = record.blocks["a"]
    starts = itertools.product(range(3), range(3), range(4))
    for start in starts:
        region = Block(start, (2, 3, 3))
        out, expected = np.full(region.shape, -1, "<i4"), np.full((6, 7, 8), -1, "<i4")
        expected[1:4, 1:5, 1:6] = array
        read_block(path, block, region, out)
        assert np.array_equal(out, expected[tuple(slice(a, a + n) for a, n in zip(start, region.shape, strict=True))])


def test_a_mapped_block_is_the_array(shard):
    path, record = shard
    for key, (array, _, _) in CASES.items():
        mapped = map_block(path, record.blocks[key][0], array.dtype)
        assert same_bits(np.asarray(mapped), array)
        assert not mapped.flags.writeable
    _, empty = save_shard(path.parent, [to_write("none", np.zeros((0, 4)))], rank=3)
    assert map_block(path, empty.blocks["none"][0], "<f8").shape == (0, 4)


def test_an_array_that_does_not_fit_the_region_is_an_error(shard):
    path, record = shard
    with pytest.raises(ValueError, match="region"):
        read_block(path, record.blocks["line"][0], Block((0,), (7,)), np.zeros(8, "<f2"))
    with pytest.raises(ValueError, match="verify"):
        read_block(path, record.blocks["line"][0], Block((0,), (7,)), np.zeros(7, "<f2"), verify="quick")
