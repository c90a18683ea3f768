"""`verify` of the nodes' own directories: shards, parity files and redundancy descriptors, as far as they lie there."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.redundancy.check import verify_redundancy
from mpi_ckpt.redundancy.descriptor import descriptor_name, parity_name
from mpi_ckpt.storage import names
from mpi_ckpt.storage.shard_file import ShardRecord, verify_file
from mpi_ckpt.tools import nodes
from mpi_ckpt.tools.progress import Advance
from mpi_ckpt.tools.verdict import Verdict, fault_of, without_action


@dataclass(frozen=True)
class _Files:
    """What lies of a rank's shard and its redundancy in one directory, and what is wrong with it."""

    nbytes: int
    faults: list[CheckpointError]


def verify_nodes(
    local: Sequence[Path], steps: Sequence[int], *, quick: bool = False, advance: Advance = lambda nbytes: None
) -> Iterator[Verdict]:
    """**Local.** A verdict for each of `steps`, of which the nodes' directories `local` hold at least a manifest.

    A step that is pruned while it is read has no verdict.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as readers:
        for step in steps:
            verdict = _verify_step(local, step, quick, readers, advance)
            if verdict.intact or step in nodes.listed_steps(local):
                yield verdict


def _verify_step(
    local: Sequence[Path], step: int, quick: bool, readers: ThreadPoolExecutor, advance: Advance
) -> Verdict:
    directories = [names.step_dir(node, step) for node in local]
    while True:
        valid, faults = nodes.manifests(local, step)
        if not valid:
            advice = "name the other nodes' directories, too: one that has an intact manifest is enough for `repair`"
            return Verdict(step, directories[0], 0, without_action(faults), advice=advice)
        manifest = nodes.choose(local, valid)
        check = partial(_check, manifest.save_id, "quick" if quick else "full", advance)
        records, places = zip(*product(manifest.shards, directories), strict=True)
        found = [*readers.map(check, records, places)]
        faults += [fault for files in found if files for fault in files.faults]
        again, _ = nodes.manifests(local, step)
        if not faults or not again or nodes.choose(local, again).save_id == manifest.save_id:
            break
        # The step was saved again meanwhile: what is missing of the older save is no damage.
    here = {record.rank for record, files in zip(records, found, strict=True) if files}
    elsewhere = tuple(record.rank for record in manifest.shards if record.rank not in here)
    nbytes = sum(files.nbytes for files in found if files)
    return Verdict(step, directories[0], nbytes, without_action(faults), elsewhere, _advice(local, step, elsewhere))


def _advice(local: Sequence[Path], step: int, elsewhere: Sequence[int]) -> str:
    more, which = (" DIR ...", " (DIR ... are those of the other nodes)") if elsewhere else ("", "")
    return (
        f"`python -m mpi_ckpt repair {shlex.join(map(str, local))}{more} --step {step}`{which} makes it again, as far "
        "as the redundancy goes; so does a launch that needs it"
    )


def _check(save_id: str, verify: str, advance: Advance, record: ShardRecord, directory: Path) -> _Files | None:
    """Read what lies in the directory of a rank's files; None where nothing of it does."""
    shard, parity, descriptor = (directory / name(record.path) for name in (str, parity_name, descriptor_name))
    sizes = {}
    for path in (shard, parity, descriptor):
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = path.lstat().st_size
    if not sizes:
        return None
    jobs: list[tuple[Path, Callable[[], object]]] = []
    # A descriptor says that the other two belong here; a shard alone is a copy that another decomposition has fetched.
    if shard in sizes or descriptor in sizes:
        jobs.append((shard, lambda: verify_file(shard, record, verify)))
    if parity in sizes or descriptor in sizes:
        jobs.append((descriptor, lambda: verify_redundancy(directory, record, save_id)))
    faults = [fault for path, work in jobs if (fault := fault_of(work, path, record.rank)) is not None]
    advance(sum(sizes.values()))
    return _Files(sum(sizes.values()), faults)
