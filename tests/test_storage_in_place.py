"""Arrays that begin on a page go to the disk and come from it without a copy, and are the same bits as any others."""

from __future__ import annotations

import mmap

import h5py
import numpy as np
import pytest

from mpi_ckpt.errors import CorruptShard
from mpi_ckpt.parallel.aligned import aligned_zeros
from mpi_ckpt.storage.block_read import block_read
from mpi_ckpt.storage.image_stream import array_content
from mpi_ckpt.storage.shard_file import read_block, read_shard, verify_file
from mpi_ckpt.storage.staging import IN_PLACE_BYTES
from tests.storage_cases import MIB, bits, flip, same_bits, save_shard, sha256, to_write, whole

N_LARGE = IN_PLACE_BYTES // 4 + MIB // 4 + 1009  # of 4 bytes: more than one piece, and neither whole pages nor chunks
SIZES = [1, 57, 1024, 1025, MIB // 4, MIB // 4 + 1024, IN_PLACE_BYTES // 4, N_LARGE]


def on_a_page(array):
    """The same array in memory that begins on a page."""
    memory = mmap.mmap(-1, max(array.nbytes, 1))
    copy = np.frombuffer(memory, np.uint8)[: array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def off_a_page(array):
    """The same array in memory that begins 64 bytes behind a page."""
    memory = on_a_page(np.zeros(array.nbytes + 64, np.uint8))
    copy = memory[64:].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("place_read", [on_a_page, off_a_page])
@pytest.mark.parametrize("place", [on_a_page, off_a_page])
@pytest.mark.parametrize("n", SIZES)
def test_any_length_comes_back_bit_for_bit_from_a_plain_file(tmp_path, n, place, place_read):
    arrays = {
        "a": bits((n,), "<f4", 1),
        "b": bits((7, 3), "<i2", 2),
        "c": bits((n,), "<f2", 3),
        "d": bits((), "<f8", 4),
    }
    path, record = save_shard(tmp_path, [to_write(key, place(array)) for key, array in arrays.items()])
    with h5py.File(path) as file:
        for key, array in arrays.items():
            assert same_bits(file["arrays"][key][...], array)
    assert record.sha256 == sha256(path)
    verify_file(path, record)
    for verify in ("full", "quick", "none"):
        found = {key: place_read(np.zeros_like(array)) for key, array in arrays.items()}
        read_shard(path, record, [(record.blocks[key][0], found[key]) for key in arrays], verify)
        assert all(same_bits(found[key], array) for key, array in arrays.items())


def test_what_begins_on_a_page_is_not_copied():
    array = aligned_zeros(N_LARGE, "<f4")
    piece = array_content(array, np.zeros(10, "<u4")).in_place(0)
    assert np.shares_memory(piece, array)
    assert piece.size == IN_PLACE_BYTES


def test_what_is_read_to_a_page_is_not_copied(tmp_path):
    _, record = save_shard(tmp_path, [to_write("a", bits((N_LARGE,), "<f4"))])
    out = aligned_zeros(N_LARGE, "<f4")
    read = block_read(record.blocks["a"][0], whole(out), out)
    in_place = [wanted for wanted in read.ranges() if wanted.memory is not None]
    assert all(np.shares_memory(wanted.memory, out) for wanted in in_place)
    assert sum(wanted.hi - wanted.lo for wanted in in_place) == out.nbytes // MIB * MIB


@pytest.mark.parametrize("look", ["read-only", "swapped", "fortran", "strided", "matrix"])
def test_any_array_on_a_page_is_saved_as_it_is(tmp_path, look):
    array = on_a_page(bits((1009, 57), "<f8"))
    if look == "read-only":
        array.flags.writeable = False
    elif look == "swapped":
        array = array.view(">f8")
    elif look == "fortran":
        array = array.T
    elif look == "strided":
        array = array[:, ::3]
    elif look == "matrix":
        array = array.view(np.matrix)
    path, record = save_shard(tmp_path, [to_write("a", array)])
    verify_file(path, record)
    with h5py.File(path) as file:
        assert same_bits(file["arrays/a"][...], np.asarray(array))


@pytest.mark.parametrize("look", ["swapped", "fortran", "strided"])
def test_any_array_on_a_page_is_restored_in_place(tmp_path, look):
    array = bits((1009, 57), "<f8")
    path, record = save_shard(tmp_path, [to_write("a", array)])
    for verify in ("full", "quick"):
        if look == "swapped":
            out = on_a_page(np.zeros((1009, 57), ">f8"))
        elif look == "fortran":
            out = on_a_page(np.zeros((57, 1009))).T
        else:
            out = on_a_page(np.zeros((1009, 3 * 57)))[:, ::3]
        read_shard(path, record, [(record.blocks["a"][0], out)], verify)
        assert same_bits(out, array)


def test_a_part_of_a_block_on_a_page_leaves_the_rest_alone(tmp_path):
    array = bits((N_LARGE,), "<f4")
    path, record = save_shard(tmp_path, [to_write("a", array)])
    block = record.blocks["a"][0]
    out = on_a_page(np.zeros(N_LARGE - 1024, "<f4"))
    read_block(path, block, type(block.block)((1024,), out.shape), out)
    assert same_bits(out, array[1024:])


@pytest.mark.parametrize("verify", ["full", "quick"])
@pytest.mark.parametrize("byte", [0, MIB, IN_PLACE_BYTES - 1, IN_PLACE_BYTES, 4 * N_LARGE - 1])
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path, verify, byte):
    path, record = save_shard(tmp_path, [to_write("a", on_a_page(bits((N_LARGE,), "<f4")))])
    flip(path, record.blocks["a"][0].offset + byte)
    with pytest.raises(CorruptShard, match=path.name):
        read_shard(path, record, [(record.blocks["a"][0], aligned_zeros(N_LARGE, "<f4"))], verify)
