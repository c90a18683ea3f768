"""A shard is a plain HDF5 file that holds the arrays bit for bit, and its record tells the truth about it."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time

import crc32c
import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_ckpt.errors import LayoutMismatch, UnsupportedState
from mpi_ckpt.layout import Block
from mpi_ckpt.storage import names
from mpi_ckpt.storage.shard_file import BlockToWrite, hash_file, read_shard, read_values, verify_file
from tests.storage_cases import DTYPES, MIB, bits, nothing_left_behind, same_bits, save_shard, sha256, to_write, whole

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def arrays(draw):
    """An array of any shape (zeros in it too) and dtype, in any order, strided, reversed, swapped or read-only."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    array = bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    look = draw(st.sampled_from(["plain", "fortran", "strided", "reversed", "swapped", "read-only"]))
    if look == "fortran":
        array = np.array(array, order="F")
    elif look == "strided" and array.ndim:
        array = np.repeat(array, 3, axis=-1)[..., ::3]
    elif look == "reversed" and array.ndim:
        array = array[::-1]
    elif look == "swapped":
        array = array.astype(array.dtype.newbyteorder(">"))
    elif look == "read-only":
        array.flags.writeable = False
    return array


def compatible(keys):
    """No key is a level of another (`a` and `a/b`): HDF5 cannot have both."""
    return not any(one != other and other.startswith(f"{one}/") for one in keys for other in keys)


@st.composite
def blocks(draw):
    """Blocks of several keys, some of them with several blocks, each somewhere in a larger global array."""
    keys = st.text("abc./é ", min_size=1, max_size=6).filter(lambda k: all(p.strip(". ") for p in k.split("/")))
    found = []
    for key in draw(st.lists(keys, max_size=4, unique=True).filter(compatible)):
        for _ in range(draw(st.integers(1, 3))):
            array = draw(arrays())
            start = tuple(draw(st.integers(0, 1000)) for _ in array.shape)
            shape = tuple(a + n + draw(st.integers(0, 9)) for a, n in zip(start, array.shape, strict=True))
            found.append(BlockToWrite(key, array, Block(start, array.shape), shape))
    return found


def targets(record, written):
    """(block record, empty array, what it should become) of every block."""
    seen: dict[str, int] = {}
    found = []
    for block in written:
        i = seen[block.key] = seen.get(block.key, -1) + 1
        found.append((record.blocks[block.key][i], np.zeros(block.array.shape, block.array.dtype), block.array))
    return found


@QUICK
@given(written=blocks(), values=st.binary(max_size=100))
def test_any_blocks_come_back_bit_for_bit(tmp_path, written, values):
    path, record = save_shard(tmp_path, written, values)
    for verify in ("full", "quick", "none"):
        found = targets(record, written)
        read_shard(path, record, [(block, out) for block, out, _ in found], verify)
        assert all(same_bits(out, array) for _, out, array in found)
    assert read_values(path, record) == values


@QUICK
@given(written=blocks(), values=st.binary(max_size=100))
def test_plain_h5py_reads_the_same_arrays_and_attributes(tmp_path, written, values):
    path, record = save_shard(tmp_path, written, values, rank=2, size=4)
    counts = {block.key: sum(other.key == block.key for other in written) for block in written}
    seen: dict[str, int] = {}
    with h5py.File(path) as file:
        for block in written:
            i = seen[block.key] = seen.get(block.key, -1) + 1
            dataset = file[f"arrays/{block.key}" + (f"/{i}" if counts[block.key] > 1 else "")]
            assert dataset.dtype == block.array.dtype.newbyteorder("<")
            assert same_bits(dataset[...] if dataset.shape else np.array(dataset[()], dataset.dtype), block.array)
            assert tuple(dataset.attrs["start"]) == block.block.start
            assert tuple(dataset.attrs["global_shape"]) == block.global_shape
            assert (dataset.id.get_offset() or 0) == record.blocks[block.key][i].offset
            assert dataset.chunks is None
            assert dataset.compression is None
        assert file["values"][...].tobytes() == values
        assert dict(file.attrs) == {
            "format": "mpi_ckpt",
            "schema_version": 1,
            "save_id": "0123456789abcdef",
            "rank": 2,
            "world_size": 4,
            "step": 10,
        }


@pytest.mark.parametrize("n", [0, 1, 57, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 1009, 17 * MIB])
def test_the_record_is_what_independent_tools_find(tmp_path, n):
    path, record = save_shard(tmp_path, [to_write("a", bits((n,), "|u1")), to_write("b", bits((57,), "<f8"))], b"v" * 7)
    content = path.read_bytes()
    assert record.nbytes == len(content)
    assert record.sha256 == sha256(path)
    assert record.crc32c == f"{crc32c.crc32c(content):08x}"
    assert hash_file(path) == (record.sha256, record.crc32c)
    assert record.values.crc32c == f"{crc32c.crc32c(b'v' * 7):08x}"
    for key, nbytes in (("a", n), ("b", 57 * 8)):
        (block,) = record.blocks[key]
        data = content[block.offset : block.offset + nbytes]
        table = np.array([crc32c.crc32c(data[i : i + MIB]) for i in range(0, nbytes, MIB)], "<u4")
        assert content[block.table_offset : block.table_offset + table.nbytes] == table.tobytes()
        assert block.table_crc32c == f"{crc32c.crc32c(table.tobytes()):08x}"
    verify_file(path, record)
    verify_file(path, record, "quick")


def test_sha256sum_prints_the_record(tmp_path):
    path, record = save_shard(tmp_path, [to_write("a", bits((1009, 57), "<f4"))])
    printed = subprocess.run(["sha256sum", path.name], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [record.sha256, path.name]


@pytest.mark.skipif(shutil.which("h5dump") is None, reason="h5dump is not here")
def test_h5dump_reads_it(tmp_path):
    written = [to_write(f"of/{i}", bits((7,), dtype)) for i, dtype in enumerate(DTYPES)]
    path, _ = save_shard(tmp_path, [*written, to_write("ints", np.arange(7)), to_write("none", np.zeros((0, 4)))])
    header = subprocess.run(["h5dump", "-H", path], capture_output=True, text=True, check=True).stdout
    assert header.count("DATASET") == len(DTYPES) + 4
    data = subprocess.run(["h5dump", "-d", "/arrays/ints", path], capture_output=True, text=True, check=True).stdout
    assert "(0): 0, 1, 2, 3, 4, 5, 6" in data


def test_the_same_state_makes_the_same_bytes_at_any_time(tmp_path):
    digests = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path, _ = save_shard(tmp_path / name, [to_write("a/b", bits((1009,), "<f4"))])
        digests.add(sha256(path))
        time.sleep(1.1)  # HDF5 may keep times, in seconds
    assert len(digests) == 1


def test_every_dataset_is_aligned_and_behind_the_metadata_and_the_table_is_last(tmp_path):
    written = [to_write(f"layer.{i}/weight", bits((i % 57,), "<f4", i)) for i in range(1000)]
    path, record = save_shard(tmp_path, written, b"values")
    with h5py.File(path) as file:
        found: list[tuple[int, int, str]] = []

        def visit(name, item):
            if isinstance(item, h5py.Dataset) and item.size:
                found.append((item.id.get_offset(), item.id.get_storage_size(), name))

        file.visititems(visit)
    found.sort()
    assert all(offset % 4096 == 0 for offset, _, _ in found)
    assert [name for _, _, name in found[-2:]] == ["values", "crc32c"]
    assert sum(found[-1][:2]) == record.nbytes == path.stat().st_size
    gaps = [after[0] - before[0] - before[1] for before, after in itertools.pairwise(found)]
    assert max(gaps) < 4096  # nothing but padding between them: all metadata is in front
    assert found[0][0] < 2 * MIB


def test_many_datasets_come_back(tmp_path):
    written = [to_write(f"layer.{i}/weight", bits((i % 57,), "<f4", i)) for i in range(300)]
    path, record = save_shard(tmp_path, written)
    found = targets(record, written)
    read_shard(path, record, [(block, out) for block, out, _ in found])
    assert all(same_bits(out, array) for _, out, array in found)


def test_large_arrays_that_are_not_contiguous_come_back(tmp_path):
    base = bits((1009, 577), "<f8")
    written = [
        to_write("transposed", base.T),
        to_write("strided", base[::-2, 3::5]),
        to_write("swapped", base.astype(">f8")),
        to_write("broadcast", np.broadcast_to(base[0], (700, 577))),
        to_write("cube", base[:, :572].reshape(1009, 13, 44).transpose(2, 0, 1)),
    ]
    path, record = save_shard(tmp_path, written)
    for verify in ("full", "quick"):
        found = [
            (block, np.zeros(array.shape, ">f8", order="F"), array) for block, _, array in targets(record, written)
        ]
        read_shard(path, record, [(block, out) for block, out, _ in found], verify)
        assert all(same_bits(out, array) for _, out, array in found)


def test_an_empty_state_is_a_shard(tmp_path):
    path, record = save_shard(tmp_path, [], b"")
    verify_file(path, record)
    with h5py.File(path) as file:
        assert (file["values"].shape, file["crc32c"].shape) == ((0,), (0,))
    assert read_values(path, record) == b""


def test_a_key_with_several_blocks_has_them_numbered(tmp_path):
    written = [
        to_write("p", np.arange(7), (0,), (57,)),
        to_write("q", np.arange(3)),
        to_write("p", np.arange(5), (20,), (57,)),
    ]
    path, record = save_shard(tmp_path, written)
    assert [block.start for block in record.blocks["p"]] == [(0,), (20,)]
    with h5py.File(path) as file:
        assert file["arrays/p/1"][...].tolist() == [0, 1, 2, 3, 4]
        assert file["arrays/q"].shape == (3,)


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array(["2026-01-01"], "M8[s]"),
        np.zeros(3, [("x", "<f4")]),
        np.zeros(3, np.longdouble),
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        *([np.zeros((1,) * 33)] if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else []),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype} {array.ndim}",
)
def test_what_no_dataset_can_hold_exactly_is_refused_by_key_and_dtype(tmp_path, array):
    with nothing_left_behind(tmp_path), pytest.raises(UnsupportedState, match="layer/odd") as caught:
        save_shard(tmp_path, [to_write("fine", np.zeros(3)), to_write("layer/odd", array)])
    assert str(array.dtype) in caught.value.found


@pytest.mark.parametrize("key", ["", "/", "a//b", "a/", "/a", ".", "a/../b", "a\0b", "a\nb", "\ud800"])
def test_a_key_that_names_no_dataset_is_refused(tmp_path, key):
    with nothing_left_behind(tmp_path), pytest.raises(UnsupportedState, match="key"):
        save_shard(tmp_path, [to_write(key, np.zeros(3))])


@pytest.mark.parametrize("keys", [("a", "a/b"), ("a/b", "a"), ("a", "a", "a/0"), ("a/0/c", "a", "a")])
def test_keys_that_want_the_same_name_are_refused(tmp_path, keys):
    with nothing_left_behind(tmp_path), pytest.raises(UnsupportedState, match="same name"):
        save_shard(tmp_path, [to_write(key, np.zeros(3)) for key in keys])


def test_an_array_that_is_not_its_block_is_refused(tmp_path):
    with nothing_left_behind(tmp_path), pytest.raises(LayoutMismatch, match="'a'"):
        save_shard(tmp_path, [BlockToWrite("a", np.zeros(7), Block((0,), (8,)), (8,))])


def test_a_file_that_is_there_is_neither_written_into_nor_removed(tmp_path):
    leftover = names.tmp(tmp_path / "rank00000.h5")
    leftover.write_bytes(b"somebody writes this")
    with nothing_left_behind(tmp_path), pytest.raises(FileExistsError):
        save_shard(tmp_path, [to_write("a", np.arange(57))])
    assert leftover.read_bytes() == b"somebody writes this"


def test_the_state_may_change_before_the_next_save(tmp_path):
    array = np.arange(1009.0)
    for _ in range(3):
        array += 1
        path, record = save_shard(tmp_path, [to_write("a", array)])
        out = np.zeros(1009)
        read_shard(path, record, [(record.blocks["a"][0], out)])
        assert np.array_equal(out, array)
    assert whole(out) == record.blocks["a"][0].block
