"""`verify`: read every committed step and compare each file with its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mpi_ckpt.errors import CheckpointError, CorruptShard
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.shard_file import ShardRecord, check_structure, hash_file


@dataclass(frozen=True)
class Verdict:
    """What was found about one step: its size in bytes, and every fault."""

    step: int
    directory: Path
    nbytes: int
    faults: list[CheckpointError]

    @property
    def intact(self) -> bool:
        """True when every file is what the manifest says."""
        return not self.faults


def verify(root: Path, *, quick: bool = False) -> Iterator[Verdict]:
    """**Local.** A verdict for each committed step below `root`, oldest first; files of a step are read in parallel.

    Compares sizes and sha256, with `quick` the crc32c instead, which reads as much but computes less.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as readers:  # hashing releases the GIL
        for step in names.list_steps(root):
            yield _verify_step(names.step_dir(root, step), step, quick, readers)


def _verify_step(directory: Path, step: int, quick: bool, readers: ThreadPoolExecutor) -> Verdict:
    try:
        manifest = read_manifest(directory)
    except CheckpointError as fault:
        return Verdict(step, directory, 0, [fault])

    found = readers.map(lambda shard: _fault_of(directory / shard.path, shard, quick), manifest.shards)
    faults = [fault for fault in found if fault is not None]
    return Verdict(step, directory, sum(shard.nbytes for shard in manifest.shards), faults)


def _fault_of(path: Path, record: ShardRecord, quick: bool) -> CheckpointError | None:
    """What is wrong with one file, if anything."""
    try:
        check_structure(path, record)
        sha256, crc32c = hash_file(path)
    except CheckpointError as fault:
        return fault
    found, expected = (crc32c, record.crc32c) if quick else (sha256, record.sha256)
    if found == expected:
        return None
    return CorruptShard(
        "a shard's bytes are not those that were saved",
        path=path,
        rank=record.rank,
        found=f"{'crc32c' if quick else 'sha256'} {found}",
        expected=expected,
        action="Restore an older step (on_damage='older'), or bring the file back from a copy.",
    )
