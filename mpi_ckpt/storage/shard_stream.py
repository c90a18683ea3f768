"""A whole shard from one place to another, checked on the way: a damaged one never arrives under its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mpi_ckpt.storage import atomic, direct
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.object_store import ObjectStore
from mpi_ckpt.storage.places import Place, RemoteFile
from mpi_ckpt.storage.read_ahead import read_ahead, stretch
from mpi_ckpt.storage.records import ShardRecord
from mpi_ckpt.storage.remote_steps import remote_step
from mpi_ckpt.storage.shard_check import check_structure, differs, opened
from mpi_ckpt.storage.staging import staging

Advance = Callable[[int], None]


def stream_shard(place: Place, record: ShardRecord) -> Iterator[np.ndarray]:
    """**Local.** The bytes of a shard in pieces (uint8), each valid until the next is taken.

    The last one comes only after the sha256 of all was found right. Raises MissingShard, CorruptShard.
    """
    check_structure(place, record)
    sha256 = hashlib.sha256()
    with opened(place) as reader, staging("sha256", "read", "read") as (slots, (hashing, *reading)):
        sent = 0
        for piece in read_ahead(reader, stretch(0, record.nbytes), slots, reading):
            hashed = hashing.submit(sha256.update, piece.data)
            piece.slot.jobs.append(hashed)
            sent += piece.data.size
            if piece.range.hi == record.nbytes:
                hashed.result()
                _check(place, record, sent, sha256.hexdigest())
            yield piece.data


def send_shard(
    store: ObjectStore, target: RemoteFile, path: Place, record: ShardRecord, advance: Advance, *, again: bool = False
) -> int:
    """**Local.** Put a shard under its key unless it is there already; the bytes sent.

    A key has its save id in it, and an object arrives whole and checked or not at all: one of the right size is it,
    unless its store has damaged it since; then send it `again`. `advance` is told of the bytes of each piece before it
    goes, and may wait or raise. Raises RemoteFailed, MissingShard, CorruptShard.
    """
    if not again and store.size(target.key) == record.nbytes:
        return 0

    def pieces() -> Iterator[np.ndarray]:
        for piece in stream_shard(path, record):
            advance(piece.size)
            yield piece

    store.put_stream(target.key, pieces(), record.nbytes)
    check_structure(target, record)
    return record.nbytes


def send_shards(
    store: ObjectStore, directory: Path, manifest: ShardManifest, mine: slice, advance: Advance, *, again: bool = False
) -> int:
    """**Local.** The same for those of the save's shards in `directory` that are `mine`; the bytes sent in all."""
    place = remote_step(store, manifest)
    return sum(
        send_shard(store, place / shard.path, directory / shard.path, shard, advance, again=again)
        for shard in manifest.shards[mine]
    )


def fetch_shard(place: Place, record: ShardRecord, path: Path, advance: Advance = lambda nbytes: None) -> None:
    """**Local.** A shard into the file `path`, durable once this returns; a file that is there is a leftover, and goes.

    Raises MissingShard, CorruptShard, RemoteFailed; OSError from the disk. No file is left then.
    """
    atomic.remove(path, missing_ok=True)
    offset = 0
    try:
        with direct.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, cached=True) as fd:
            for piece in stream_shard(place, record):
                direct.write_all(fd, piece, offset)
                offset += piece.size
                advance(piece.size)
            atomic.fsync_file(fd, path)
    except BaseException:
        atomic.remove(path, missing_ok=True)
        raise


def _check(place: Place, record: ShardRecord, nbytes: int, sha256: str) -> None:
    if (nbytes, sha256) != (record.nbytes, record.sha256):
        expected = f"{record.nbytes} bytes of sha256 {record.sha256}"
        raise differs(place, found=f"{nbytes} bytes of sha256 {sha256}", expected=expected)
