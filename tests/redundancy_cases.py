"""What the tests of redundancy need: the manifest's record of a file that is no shard."""

from __future__ import annotations

import hashlib

from mpi_ckpt.storage.records import ShardRecord, ValuesRecord


def record(rank: int, data: bytes) -> ShardRecord:
    """Of rank's file with these bytes."""
    digest = hashlib.sha256(data).hexdigest()
    return ShardRecord(rank, f"rank{rank:05d}.h5", len(data), digest, "00000000", {}, ValuesRecord(0, 0, "00000000"))
