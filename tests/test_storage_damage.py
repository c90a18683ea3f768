"""Damage to a shard is never silent: a typed error that names file, rank, found, expected and what to do."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from mpi_ckpt.errors import CorruptShard, MissingShard
from mpi_ckpt.layout import Block
from mpi_ckpt.storage.shard_file import (
    check_structure,
    map_block,
    read_block,
    read_shard,
    read_values,
    verify_file,
)
from tests.storage_cases import MIB, bits, flip, save_shard, to_write

N = 3 * MIB // 4 + 57
EVERYTHING = Block((0,), (N,))


@pytest.fixture
def shard(tmp_path):
    return save_shard(
        tmp_path, [to_write("a", bits((N,), "<f4")), to_write("b", bits((7,), "|u1"))], b'{"x":1}', rank=2
    )


def full(path, record):
    read_shard(path, record, [(record.blocks["a"][0], np.zeros(N, "<f4"))])


def quick(path, record):
    read_shard(path, record, [(record.blocks["a"][0], np.zeros(N, "<f4"))], "quick")


def none(path, record):
    read_shard(path, record, [(record.blocks["a"][0], np.zeros(N, "<f4"))], "none")


def part(path, record):
    read_block(path, record.blocks["a"][0], EVERYTHING, np.zeros(N, "<f4"))


def part_unverified(path, record):
    read_block(path, record.blocks["a"][0], EVERYTHING, np.zeros(N, "<f4"), "none")


def mapped(path, record):
    map_block(path, record.blocks["a"][0], "<f4")


def verify_quick(path, record):
    verify_file(path, record, "quick")


def complaint(reader, shard, error=CorruptShard):
    path, record = shard
    with pytest.raises(error) as caught:
        reader(path, record)
    found = caught.value
    assert found.path == str(path)
    assert found.rank == 2
    assert found.found
    assert found.expected
    assert found.found != found.expected
    assert "on_damage='older'" in found.action
    return found


@pytest.mark.parametrize("reader", [full, quick, none, part, mapped, check_structure, verify_file, read_values])
def test_a_missing_file_is_named(shard, reader):
    shard[0].unlink()
    complaint(reader, shard, MissingShard)


@pytest.mark.parametrize("reader", [full, quick, none, check_structure, verify_file, verify_quick])
@pytest.mark.parametrize("change", [-4, 4, -4096, 1])
def test_bytes_cut_off_or_appended_are_found(shard, reader, change):
    path, record = shard
    if change < 0:
        os.truncate(path, record.nbytes + change)
    else:
        with path.open("ab") as file:
            file.write(b"x" * change)
    found = complaint(reader, shard)
    assert found.found == f"{record.nbytes + change} bytes"
    assert found.expected == f"{record.nbytes} bytes"


@pytest.mark.parametrize("reader", [part, part_unverified, mapped, read_values])
def test_readers_of_a_part_notice_the_end_of_the_file(shard, reader):
    path, record = shard
    os.truncate(path, record.blocks["a"][0].offset + 5000)
    complaint(reader, shard)


@pytest.mark.parametrize("reader", [full, verify_file, verify_quick])
@pytest.mark.parametrize("where", ["head", "padding", "a", "middle of a", "end of a", "values", "table", "last byte"])
def test_one_flipped_bit_anywhere_is_found_by_whoever_reads_everything(shard, reader, where):
    path, record = shard
    a = record.blocks["a"][0].offset
    offsets = {
        "head": 100,
        "padding": a - 1,
        "a": a,
        "middle of a": a + 2 * N,
        "end of a": a + 4 * N - 1,
        "values": record.values.offset,
        "table": record.blocks["b"][0].table_offset,
        "last byte": record.nbytes - 1,
    }
    flip(path, offsets[where])
    found = complaint(reader, shard)
    assert (record.crc32c if reader is verify_quick else record.sha256) in found.expected


@pytest.mark.parametrize("reader", [quick, part])
@pytest.mark.parametrize("at", [0, 1, MIB - 1, MIB, 2 * MIB + 5, 4 * N - 1])
def test_one_flipped_bit_of_a_block_is_found_by_its_checksums(shard, reader, at):
    path, record = shard
    flip(path, record.blocks["a"][0].offset + at)
    complaint(reader, shard)


def test_flipped_values_are_found(shard):
    path, record = shard
    assert read_values(path, record) == b'{"x":1}'
    flip(path, record.values.offset + 3)
    complaint(read_values, shard)


@pytest.mark.parametrize("reader", [full, quick, verify_file, verify_quick])
def test_a_file_of_another_rank_or_step_in_its_place_is_found(shard, tmp_path, reader):
    other = tmp_path / "other"
    other.mkdir()
    same_size = [to_write("a", bits((N,), "<f4", seed=1)), to_write("b", bits((7,), "|u1", seed=1))]
    path, record = save_shard(other, same_size, b'{"x":2}', rank=1)
    assert record.nbytes == shard[1].nbytes
    shutil.copy(path, shard[0])
    complaint(reader, shard)


@pytest.mark.parametrize("reader", [full, quick, none, part, check_structure, verify_file, read_values])
def test_a_symbolic_link_in_its_place_is_refused(shard, reader):
    path, _ = shard
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    assert "link" in str(complaint(reader, shard)) or reader is not part


@pytest.mark.parametrize("reader", [check_structure, verify_file, full])
def test_a_directory_or_a_pipe_in_its_place_is_refused(shard, reader):
    path, _ = shard
    path.unlink()
    path.mkdir()
    assert "regular file" in str(complaint(reader, shard))
    path.rmdir()
    os.mkfifo(path)
    assert "regular file" in str(complaint(reader, shard))


def test_the_wrong_digest_in_the_record_is_a_difference(shard):
    path, record = shard
    with pytest.raises(CorruptShard) as caught:
        verify_file(path, record._replace(sha256="0" * 64))
    assert record.sha256 in caught.value.found
    assert "0" * 64 in caught.value.expected


def test_a_level_that_does_not_exist_is_an_error(shard):
    path, record = shard
    with pytest.raises(ValueError, match="verify"):
        verify_file(path, record, "none")
    with pytest.raises(ValueError, match="verify"):
        read_shard(path, record, [], "crc32c")
