"""`verify`: read committed steps and compare every file with its manifest."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpi_ckpt.checkpoint import steps as step_directories
from mpi_ckpt.errors import CheckpointError, CorruptShard
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.shard_file import ShardRecord, verify_file
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import checkpoints_root, committed_step
from mpi_ckpt.tools.progress import Advance, progress

HELP = "read every committed step and compare it with its manifest"
DESCRIPTION = """Read every committed step (or --step) and compare it with its manifest: the manifest's own digest and
structure, and of each shard presence, size, sha256 and crc32c. With --quick the crc32c alone, which reads as much and
computes less: it finds damage, not forgery. Nothing is changed. A step that is pruned meanwhile is no damage."""
EXAMPLE = "python -m mpi_ckpt verify runs/demo --quick"


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


def verify(
    root: Path, *, quick: bool = False, steps: Sequence[int] | None = None, advance: Advance = lambda nbytes: None
) -> Iterator[Verdict]:
    """**Local.** A verdict for each of `steps` (None: every committed step) below `root`; files are read in parallel.

    Compares sizes, sha256 and crc32c; with `quick` the crc32c alone. `advance` is told of every file's bytes. A step
    that is pruned while it is read has no verdict.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as readers:  # hashing releases the GIL
        for step in names.list_steps(root) if steps is None else steps:
            verdict = _verify_step(names.step_dir(root, step), step, quick, readers, advance)
            if verdict.intact or step_directories.is_committed(verdict.directory):
                yield verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    parser.add_argument("--quick", action="store_true", help="compare crc32c instead of sha256")
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="this step alone (default: all)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print a verdict a step; the exit status."""
    root = checkpoints_root(arguments.run_dir)
    newest = committed_step(root, arguments.step)  # raises where there is nothing to verify
    steps = names.list_steps(root) if arguments.step is None else [arguments.step]
    total = sum(_size_of(names.step_dir(root, step)) for step in steps)
    verdicts = []
    with progress("verify", total) as advance:
        for verdict in verify(root, quick=arguments.quick, steps=steps, advance=advance):
            verdicts.append(verdict)
            if not arguments.json:
                _print(verdict)
    if arguments.json:
        text.print_json([_as_json(verdict) for verdict in verdicts])
    del newest
    return status.WELL if all(verdict.intact for verdict in verdicts) else status.NOT_WELL
