"""Reading a shard by its record, without parsing HDF5: whole or any part of it, verified by sha256 or by the chunk.

Bytes are read ahead into staging buffers, past the page cache where that is possible, and copied from there: memory
stays constant, and one pass over the file serves both the arrays and the digest.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpi_ckpt.layout import Block
from mpi_ckpt.storage.block_read import BlockRead, block_read
from mpi_ckpt.storage.crc import CHUNK, crc32c, hexadecimal, n_chunks
from mpi_ckpt.storage.places import Place
from mpi_ckpt.storage.read_ahead import Piece, Range, read_ahead, stretch
from mpi_ckpt.storage.records import BlockRecord, ShardRecord
from mpi_ckpt.storage.shard_check import check_structure, corrupt, differs, missing, opened
from mpi_ckpt.storage.staging import staging


def read_block(path: Place, block: BlockRecord, region: Block, out: np.ndarray, verify: str = "crc32c") -> int:
    """**Local.** Read the part of a block that lies in `region` into `out`; see `read_blocks`."""
    return read_blocks(path, [(block, region, out)], verify)


def read_blocks(path: Place, reads: Iterable[tuple[BlockRecord, Block, np.ndarray]], verify: str = "crc32c") -> int:
    """**Local.** For each (block, region, out): the part of the block that lies in `region`, into `out`.

    `region` is a box of the global array; `out` holds it: same shape, the saved dtype in any byte order, any strides.
    Elements of the region outside the block stay as they are. Only the chunks (1 MiB) that are needed are read, and
    with verify="crc32c" (not "none") checked. Returns the number of bytes read. Raises MissingShard, or CorruptShard
    for a chunk whose crc32c differs; `out` is undefined then.
    """
    if verify not in ("crc32c", "none"):
        raise ValueError(f"verify: found {verify!r}, expected 'crc32c' or 'none'")
    todo = _plan(reads)
    if not todo:
        return 0
    tables = _read_tables(path, todo) if verify == "crc32c" else {}
    nbytes = 0
    with opened(path) as reader, staging("read", "read") as (slots, lanes):
        for piece in read_ahead(reader, (r for read in todo for r in read.ranges()), slots, lanes):
            read, lo = piece.range.tag, piece.range.lo
            _check_length(path, piece)
            if tables:
                _check_chunks(path, read, piece.data, lo, tables[read])
            if piece.range.memory is None:
                read.put(piece.data, lo)
            nbytes += piece.data.size
    return nbytes


def read_shard(
    path: Place, record: ShardRecord, targets: Sequence[tuple[BlockRecord, np.ndarray]], verify: str = "full"
) -> int:
    """**Local.** Read whole blocks, each into its array (of the block's shape), every byte once.

    verify="full" reads the whole file and checks its sha256 on the way; "quick" checks the crc32c of the targets'
    chunks, "none" nothing but the file's size. Returns the number of bytes read. Raises MissingShard, or CorruptShard;
    after a digest error the arrays are undefined.
    """
    if verify not in ("full", "quick", "none"):
        raise ValueError(f"verify: found {verify!r}, expected 'full', 'quick' or 'none'")
    check_structure(path, record)
    reads = [(block, block.block, out) for block, out in targets]
    if verify != "full":
        return read_blocks(path, reads, "crc32c" if verify == "quick" else "none")
    todo = deque(sorted(_plan(reads), key=lambda read: read.record.offset))
    sha256, ranges = hashlib.sha256(), list(_file_ranges(record.nbytes, todo))
    with opened(path) as reader, staging("sha256", "read", "read") as (slots, (hashing, *reading)):
        hashed = []
        for piece in read_ahead(reader, ranges, slots, reading):
            hashed.append(hashing.submit(sha256.update, piece.data))
            piece.slot.jobs.append(hashed[-1])
            _check_length(path, piece)
            while todo and todo[0].end <= piece.range.lo:
                todo.popleft()
            for read in todo:
                if read.record.offset >= piece.range.hi or piece.range.memory is not None:
                    break
                read.put(piece.data, piece.range.lo)
        for job in hashed:
            job.result()
    if sha256.hexdigest() != record.sha256:
        raise differs(path, found=f"sha256 {sha256.hexdigest()}", expected=f"sha256 {record.sha256}")
    return record.nbytes


def read_values(path: Place, record: ShardRecord) -> bytes:
    """**Local.** The values' bytes, checked against their crc32c. Raises MissingShard or CorruptShard."""
    values = record.values
    with opened(path, cached=True) as reader:
        data = reader.read(values.offset, values.nbytes)
    _check_crc(path, "the values of a shard are not those that were saved", data, values.crc32c)
    return data


def map_block(path: Path, block: BlockRecord, dtype: str | np.dtype) -> np.ndarray:
    """**Local.** A read-only array over the file itself: nothing is read before it is touched, nothing verified."""
    if 0 in block.shape:
        return np.empty(block.shape, dtype)
    try:
        return np.memmap(path, dtype, "r", block.offset, block.shape)
    except FileNotFoundError:
        raise missing(path) from None
    except ValueError as error:  # the file ends before the block does
        raise corrupt(path, "a shard is too short for one of its blocks", found=error, expected=block) from None


def _file_ranges(nbytes: int, reads: Iterable[BlockRead]) -> Iterator[Range[Any]]:
    """The ranges that make a file of `nbytes`, with what `reads`, in the order of the file, can take in place."""
    end = 0
    for wanted in (wanted for read in reads for wanted in read.ranges() if wanted.memory is not None):
        yield from stretch(end, wanted.lo)
        yield wanted
        end = wanted.hi
    yield from stretch(end, nbytes)


def _plan(reads: Iterable[tuple[BlockRecord, Block, np.ndarray]]) -> list[BlockRead]:
    return [read for read in (block_read(*each) for each in reads) if read is not None]


def _check_length(path: Place, piece: Piece[Any]) -> None:
    expected = piece.range.hi - piece.range.lo
    if piece.data.size < expected:
        found = f"its end at {piece.range.lo + piece.data.size} bytes"
        raise corrupt(path, "a shard is cut short", found=found, expected=f"at least {piece.range.hi} bytes")


def _check_chunks(path: Place, read: BlockRead, data: np.ndarray, lo: int, table: np.ndarray) -> None:
    first = (lo - read.record.offset) // CHUNK
    for i in range(n_chunks(data.size)):
        what = f"the bytes of a shard from offset {lo + i * CHUNK} on are not those that were saved"
        _check_crc(path, what, data[i * CHUNK : (i + 1) * CHUNK], hexadecimal(int(table[first + i])))


def _read_tables(path: Place, reads: Sequence[BlockRead]) -> dict[BlockRead, np.ndarray]:
    """The crc32c of the chunks of each read's block, uint32, themselves checked."""
    tables = {}
    with opened(path, cached=True) as reader:
        for read in reads:
            data = reader.read(read.record.table_offset, 4 * n_chunks(read.nbytes))
            _check_crc(path, "the table of checksums in a shard is damaged", data, read.record.table_crc32c)
            tables[read] = np.frombuffer(data, "<u4")
    return tables


def _check_crc(path: Place, what: str, data: bytes | np.ndarray, expected: str) -> None:
    found = hexadecimal(crc32c(data))
    if found != expected:
        raise corrupt(path, what, found=f"crc32c {found}", expected=f"crc32c {expected}")
