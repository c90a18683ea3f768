"""`reshard`: a step for another number of ranks, written by one process in constant memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpi_ckpt.checkpoint.documents import Document, read_document, read_per_rank
from mpi_ckpt.layout import Block, shard_range
from mpi_ckpt.storage.manifest import ArrayRecord, ShardManifest, read_manifest
from mpi_ckpt.storage.shard_file import BlockToWrite, StreamedArray
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import find_whole, new_root, reading
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.source import ArraySource, Windows, array_bytes
from mpi_ckpt.tools.writing import NewStep, write_step

HELP = "write a step anew for another number of ranks"
DESCRIPTION = """Write a committed step of RUN_DIR into the checkpoints directory --out, for M ranks: those restore it
as if they had saved it, without --elastic. Every sharded array is dealt anew along its first axis, the first ranks
getting one row (or element) more; replicated arrays and values stay what they are. Everything read is verified by its
crc32c.

What becomes of values per rank (a generator of each rank, say) only the application knows: the step carries those of
the old ranks along, and the restore asks PerRank's `resize`, as an elastic restore does. With as many ranks as
before, each keeps its own. (A step can be restored on another number of ranks without this, too: world_size="any",
--elastic.)"""
EXAMPLE = """python -m mpi_ckpt reshard runs/demo --ranks 6 --out runs/demo-6/checkpoints
  cp runs/demo/run.json runs/demo-6    # what the training command wants beside it"""


def reshard(directory: Path, ranks: int, out: Path, advance: Advance = lambda nbytes: None) -> Path:
    """**Local.** The step of `directory` again, for `ranks` ranks, below the checkpoints root `out`.

    Returns the new step's directory. `advance` is told of the bytes of arrays as they are written. Raises StepExists,
    MissingShard, CorruptShard, InvalidManifest, DirectoryInUse, SaveFailed, OSError; nothing is committed then.
    """
    manifest = read_manifest(directory)
    sources = {key: ArraySource(directory, manifest, key) for key in manifest.arrays}
    documents = _documents(directory, manifest, ranks)

    def contents(rank: int) -> tuple[list[BlockToWrite], Document]:
        blocks = []
        for key, array in manifest.arrays.items():
            block = dealt(array, ranks, rank)
            if block is not None:
                content = counted(Windows(sources[key], block).streamed(), advance)
                blocks.append(BlockToWrite(key, content, block, array.shape))
        return blocks, documents(rank)

    new = NewStep(
        step=manifest.step,
        world_size=ranks,
        nbytes=array_bytes(manifest.arrays),
        arrays=manifest.arrays,
        contents=contents,
        index={name: (entry.start, entry.shape) for name, entry in manifest.index.items()},
        meta=manifest.meta,
        metrics=manifest.metrics,
        environment=manifest.environment | {"resharded": f"from {manifest.world_size} ranks, save {manifest.save_id}"},
        wall_clock_seconds=manifest.wall_clock_seconds,
    )
    return write_step(out, new)


def dealt(array: ArrayRecord, ranks: int, rank: int) -> Block | None:
    """The block of an array that `rank` of `ranks` gets: an interval of the first axis, perhaps empty.

    Replicated arrays, and those without an axis, are rank 0's; None for the others.
    """
    if array.replicated or not array.shape:
        return Block((0,) * len(array.shape), array.shape) if rank == 0 else None
    start, stop = shard_range(array.shape[0], ranks, rank)
    return Block((start,) + (0,) * (len(array.shape) - 1), (stop - start, *array.shape[1:]))


def counted(array: StreamedArray, advance: Advance) -> StreamedArray:
    """The same array; `advance` is told of its bytes as they are asked for."""

    def copy(lo: int, out: np.ndarray) -> None:
        array.copy(lo, out)
        advance(out.size)

    return StreamedArray(array.dtype, array.shape, copy)


def _documents(directory: Path, manifest: ShardManifest, ranks: int) -> Callable[[int], Document]:
    """The values' document of each new rank."""
    first = read_document(directory, manifest, 0)
    old: list[dict[str, Any]] = read_per_rank(directory, manifest, first)
    everywhere = {"replicated": first["replicated"]}
    if len(old) == ranks:
        return lambda rank: {"per_rank": old[rank]} | ({} if rank else everywhere)
    carried = {"old_per_rank": old} if any(old) else {}
    return lambda rank: {"per_rank": {}} | ({} if rank else everywhere | carried)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    parser.add_argument("--ranks", metavar="M", type=text.positive, required=True, help="the new number of ranks")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the new checkpoint goes")
    text.add_step(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Reshard; the exit status."""
    directory = find_whole(arguments.run_dir, arguments.step)
    with reading(directory), progress("reshard", array_bytes(read_manifest(directory).arrays)) as advance:
        written = reshard(directory, arguments.ranks, new_root(arguments.out), advance)
    print(f"{written}: for {arguments.ranks} rank{'s' * (arguments.ranks != 1)}")
    return status.WELL
