"""One rank's file: an HDF5 file of its blocks and values, written in one pass at the speed of the disk.

    /arrays/<key>        the block of a global array (or /arrays/<key>/<i> where the rank holds several)
                         attributes `start` and `global_shape`, int64, one number an axis
    /values              plain values, tagged JSON bytes, uint8
    /crc32c              of every 1 MiB of every block, in the order of the blocks, uint32; last in the file
    root attributes      format, schema_version, save_id, rank, world_size, step

Datasets are contiguous, little-endian and 4096-aligned, without compression and fill values. h5py lays the file out in
memory; the bytes go from the arrays through staging buffers to the disk, while another thread takes their sha256.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from mpi_ckpt.errors import LayoutMismatch, UnsupportedState
from mpi_ckpt.layout import Block
from mpi_ckpt.storage import atomic, direct, names
from mpi_ckpt.storage.crc import crc32c, hexadecimal, n_chunks
from mpi_ckpt.storage.hdf5_image import Dataset, lay_out
from mpi_ckpt.storage.image_stream import (
    StreamedArray,
    array_content,
    bytes_content,
    read_image,
    view_image,
    write_image,
)
from mpi_ckpt.storage.records import (
    FORMAT,
    ITEMSIZE,
    MAX_AXES,
    SCHEMA_VERSION,
    BlockRecord,
    ShardRecord,
    ValuesRecord,
)
from mpi_ckpt.storage.shard_check import check_structure, hash_file, verify_file
from mpi_ckpt.storage.shard_read import (
    map_block,
    read_block,
    read_blocks,
    read_shard,
    read_values,
)

__all__ = [
    "BlockToWrite",
    "ShardAttributes",
    "ShardImage",
    "ShardRecord",
    "StreamedArray",
    "check_structure",
    "dataset_path",
    "hash_file",
    "map_block",
    "read_block",
    "read_blocks",
    "read_shard",
    "read_values",
    "verify_file",
    "write_shard",
]


@dataclass(frozen=True)
class BlockToWrite:
    """A block with its bytes: an array of any strides and byte order, and where it lies in the global array `key`."""

    key: str
    array: np.ndarray | StreamedArray
    block: Block
    global_shape: tuple[int, ...]


@dataclass(frozen=True)
class ShardAttributes:
    """What a shard says of itself in its root attributes."""

    save_id: str
    rank: int
    world_size: int
    step: int


def write_shard(path: Path, blocks: Sequence[BlockToWrite], values: bytes, attributes: ShardAttributes) -> ShardRecord:
    """**Local.** Write one rank's file to `path`, a new temporary name, and make it durable; the caller publishes.

    Raises what making a ShardImage and its `write` do.
    """
    return ShardImage(blocks, values, attributes).write(path)


class ShardImage:
    """One rank's file laid out in memory, `nbytes` long: to be written, and meanwhile read by those who protect it."""

    def __init__(self, blocks: Sequence[BlockToWrite], values: bytes, attributes: ShardAttributes) -> None:
        """**Local.** Raises UnsupportedState for a key or dtype that no dataset can hold, LayoutMismatch when a block
        and its array differ in shape."""
        for block in blocks:
            _check_array(block)
        self._blocks, self._values, self._attributes = blocks, values, attributes
        table, self._tables = _tables([block.array.nbytes for block in blocks])
        self._image = lay_out(_datasets(blocks, len(values), table.size), _root_attributes(attributes))
        contents = [array_content(block.array, part) for block, part in zip(blocks, self._tables, strict=True)]
        self._contents = [*contents, bytes_content(values), bytes_content(table.data)]
        self._digested = threading.Event()  # the table of checksums, the file's end, is filled as the file is written
        self.nbytes = self._image.nbytes

    def view(self, lo: int, n: int) -> np.ndarray | None:
        """**Local.** The bytes lo..lo+n-1, uint8 [n], where they lie in an array; None where they do not."""
        return view_image(self._image, self._contents, lo, n)

    def read(self, lo: int, buffer: np.ndarray, n: int) -> None:
        """**Local.** The bytes lo..lo+n-1 into `buffer` (uint8); `lo` begins on a page. For those at the end of the
        file it waits until `write` is over, and gives whatever is there if that failed."""
        if lo + n > self._image.offsets[-1]:
            self._digested.wait()
        read_image(self._image, self._contents, lo, buffer[:n])

    def write(self, path: Path) -> ShardRecord:
        """**Local.** The file, durable under `path`, a new temporary name; the record's path is the published name.

        Once. Beside the arrays it takes 12 MiB of memory, kept for the next. Raises FileExistsError for a leftover,
        OSError from the disk; a file that was begun is removed then.
        """
        try:
            with _new_file(path) as fd:
                sha256, crc = write_image(fd, self._image, self._contents)
                self._digested.set()
                os.ftruncate(fd, self.nbytes)  # the last piece was padded to whole pages
                atomic.fsync_file(fd, path)
        finally:
            self._digested.set()
        *offsets, values_offset, table_offset = self._image.offsets
        return ShardRecord(
            rank=self._attributes.rank,
            path=names.published(path).name,
            nbytes=self.nbytes,
            sha256=sha256,
            crc32c=hexadecimal(crc),
            blocks=_block_records(self._blocks, offsets, self._tables, table_offset),
            values=ValuesRecord(values_offset, len(self._values), hexadecimal(crc32c(self._values))),
        )


def dataset_path(key: str, position: int, count: int) -> str:
    """Where a shard has the block at `position` of the `count` blocks of `key` that its rank holds."""
    return f"/arrays/{key}" if count == 1 else f"/arrays/{key}/{position}"


def _tables(nbytes: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Room for the crc32c of every chunk of blocks of `nbytes`, and each block's part of it (views)."""
    bounds = [0, *accumulate(map(n_chunks, nbytes))]
    table = np.zeros(bounds[-1], "<u4")
    return table, [table[a:b] for a, b in pairwise(bounds)]


def _datasets(blocks: Sequence[BlockToWrite], values_nbytes: int, table_size: int) -> list[Dataset]:
    found = [
        Dataset(
            path,
            block.array.dtype.newbyteorder("<"),
            block.array.shape,
            {"start": block.block.start, "global_shape": block.global_shape},
        )
        for path, block in zip(_paths([block.key for block in blocks]), blocks, strict=True)
    ]
    found.append(Dataset("/values", np.dtype("u1"), (values_nbytes,)))
    found.append(Dataset("/crc32c", np.dtype("<u4"), (table_size,)))
    return found


def _paths(keys: Sequence[str]) -> list[str]:
    """A dataset path for each block, given the blocks' keys. Raises UnsupportedState when HDF5 cannot have them all."""
    total, seen = Counter(keys), Counter[str]()
    found = []
    for key in keys:
        _check_key(key)
        found.append(dataset_path(key, seen[key], total[key]))
        seen[key] += 1
    groups = {path[:i] for path in found for i, letter in enumerate(path) if letter == "/"}
    for path, n in Counter(found).items():
        if n > 1 or path in groups:
            raise UnsupportedState(
                "two keys of the state want the same name in a shard",
                found=path,
                expected="no key that is another key's level or list entry",
                action="Rename one of them.",
            )
    return found


def _check_key(key: str) -> None:
    levels = key.split("/")
    if not all(levels) or "." in levels or ".." in levels or "\0" in key or not key.isprintable():
        raise UnsupportedState(
            "a key of the state cannot name a dataset",
            found=repr(key),
            expected="non-empty printable levels, joined by '/', none of them '.' or '..'",
            action="Rename the key.",
        )


def _check_array(block: BlockToWrite) -> None:
    array, dtype = block.array, block.array.dtype
    if dtype.newbyteorder("<").str not in ITEMSIZE or array.ndim > MAX_AXES or isinstance(array, np.ma.MaskedArray):
        raise UnsupportedState(
            f"the array at {block.key!r} cannot be stored exactly",
            found=f"{type(array).__name__} of dtype {dtype} with {array.ndim} axes",
            expected=f"bool, integers, floats of 2, 4 or 8 bytes, complex of 8 or 16 bytes; at most {MAX_AXES} axes",
            action="Convert the array, or save what it consists of.",
        )
    if array.shape != block.block.shape or len(block.global_shape) != array.ndim:
        raise LayoutMismatch(
            f"the array at {block.key!r} is not the block that it is said to be",
            found=f"an array of shape {array.shape}",
            expected=f"shape {block.block.shape}, a block of a global array of shape {block.global_shape}",
        )


def _root_attributes(attributes: ShardAttributes) -> dict[str, str | int]:
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "save_id": attributes.save_id,
        "rank": attributes.rank,
        "world_size": attributes.world_size,
        "step": attributes.step,
    }


def _block_records(
    blocks: Sequence[BlockToWrite], offsets: Sequence[int], tables: Sequence[np.ndarray], table_offset: int
) -> dict[str, tuple[BlockRecord, ...]]:
    found: dict[str, tuple[BlockRecord, ...]] = {}
    for block, offset, table in zip(blocks, offsets, tables, strict=True):
        crc = hexadecimal(crc32c(table))
        record = BlockRecord(block.block.start, block.block.shape, offset, table_offset, crc)
        found[block.key] = (*found.get(block.key, ()), record)
        table_offset += table.nbytes
    return found


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A descriptor of a file that was not there; after a failure, close included, it is not there again."""
    try:
        with direct.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            yield fd
    except FileExistsError:
        # It may be that of a launch which has taken over, and writes it at this moment.
        raise
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            atomic.remove(path, missing_ok=True)
        raise
