"""The manifest of a step: its one file that says what the step consists of, and whose existence commits it.

`build_manifest` gathers the ranks' records, `write_manifest` puts it in place, `read_manifest` takes it back and trusts
nothing unchecked. See `manifest_json` for the text, `manifest_check` for the checks and `records` for the entries.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpi_ckpt.errors import InvalidManifest, LayoutMismatch, NoCheckpoint
from mpi_ckpt.storage import atomic, manifest_json, names
from mpi_ckpt.storage.manifest_check import check_document
from mpi_ckpt.storage.manifest_layout import check_index, check_tilings, flat_arrays
from mpi_ckpt.storage.records import (
    FORMAT,
    SCHEMA_VERSION,
    ArrayRecord,
    BlockRecord,
    IndexRecord,
    ShardRecord,
    ValuesRecord,
)
from mpi_ckpt.storage.shard_line import shard_line

__all__ = [
    "ArrayRecord",
    "BlockRecord",
    "IndexRecord",
    "ShardManifest",
    "ShardRecord",
    "ValuesRecord",
    "build_manifest",
    "flat_arrays",
    "read_manifest",
    "write_manifest",
]


@dataclass(frozen=True)
class ShardManifest:
    """What a committed step consists of; `shards[r]` is the file of rank r."""

    step: int
    save_id: str
    world_size: int
    arrays: dict[str, ArrayRecord]
    shards: tuple[ShardRecord, ...]
    index: dict[str, IndexRecord] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    created: str = ""
    wall_clock_seconds: float = 0.0
    save_count: int = 0  # of the run's saves so far, this one included; 0 where nobody counts

    def to_json(self) -> str:
        """**Local.** Strict JSON with a digest of its own. Raises UnsupportedState where `meta` is not plain JSON."""
        with _paused_gc():
            return manifest_json.dump(_document(self), {"shards": map(shard_line, self.shards)})

    @classmethod
    def from_json(cls, text: str, path: object = None) -> ShardManifest:
        """**Local.** The manifest that `text` is; `path` is named in errors.

        The digest is checked before anything else, then every field. Raises InvalidManifest, UnknownSchema.
        """
        with _paused_gc():
            return cls(**check_document(manifest_json.load(text, path), path))


def build_manifest(
    records: Sequence[ShardRecord],
    *,
    step: int,
    save_id: str,
    arrays: Mapping[str, ArrayRecord],
    index: Mapping[str, tuple[int, tuple[int, ...]]],
    meta: dict[str, Any],
    environment: dict[str, Any],
    created: str,
    wall_clock_seconds: float,
    metrics: dict[str, float] | None = None,
    save_count: int = 0,
) -> ShardManifest:
    """**Local.** The manifest of the ranks' `records`; `index` maps names to (first element, shape).

    A rank's `param_shard_offset` and `param_shard_numel` are set where the flat parameter space is in use (there is an
    index, or an array `param`) and the rank holds one interval of it. Raises LayoutMismatch unless the records are
    those of ranks 0 to n-1, their blocks tile the arrays, and the index lies in the flat parameter space.
    """
    shards = sorted(records, key=lambda record: record.rank)
    if [record.rank for record in shards] != list(range(len(shards))):
        found, expected = sorted(record.rank for record in shards), f"the ranks 0 to {len(shards) - 1}"
        raise LayoutMismatch("the records are not those of all ranks", found=found, expected=expected)
    entries = {name: IndexRecord(start, tuple(shape)) for name, (start, shape) in index.items()}
    check_tilings(arrays, shards)
    check_index(arrays, entries)
    flat = flat_arrays(arrays)
    if flat and (entries or flat[0].rpartition("/")[2] == "param"):
        shards = [_with_interval(record, record.blocks.get(flat[0], ())) for record in shards]
    return ShardManifest(
        step=step,
        save_id=save_id,
        world_size=len(shards),
        arrays=dict(arrays),
        shards=tuple(shards),
        index=entries,
        meta=meta,
        metrics=metrics or {},
        environment=environment,
        created=created,
        wall_clock_seconds=wall_clock_seconds,
        save_count=save_count,
    )


def read_manifest(directory: Path) -> ShardManifest:
    """**Local.** The manifest of a step's directory.

    Raises NoCheckpoint where the step is not committed; InvalidManifest for a fault, also when directory and manifest
    do not speak of the same step.
    """
    path = names.manifest_path(directory)
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise NoCheckpoint(
            "the step is not committed",
            path=path,
            found="no manifest",
            expected=names.MANIFEST,
            action="List the committed steps with `ls`, and name one of them.",
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidManifest("the manifest is not UTF-8", path=path, found=error, expected="strict JSON") from None
    manifest = ShardManifest.from_json(text, path)
    if names.parse_step(path.parent.name) != manifest.step:
        raise InvalidManifest(
            "the manifest's field step is not the step of its directory",
            path=path,
            found=f"step {manifest.step}",
            expected=f"the step of {path.parent.name}",
            action="Give the directory its own name back.",
        )
    return manifest


def write_manifest(directory: Path, manifest: ShardManifest) -> None:
    """**Local.** Commit the step: put its manifest in place, durably, whole or not at all. Raises OSError."""
    atomic.write_file(names.manifest_path(directory), manifest.to_json())


def _with_interval(record: ShardRecord, held: tuple[BlockRecord, ...]) -> ShardRecord:
    if len(held) != 1:
        return record
    return record._replace(param_shard_offset=held[0].start[0], param_shard_numel=held[0].shape[0])


def _document(manifest: ShardManifest) -> dict[str, Any]:
    counted = {"save_count": manifest.save_count} if manifest.save_count else {}
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "save_id": manifest.save_id,
        "world_size": manifest.world_size,
        "step": manifest.step,
        "wall_clock_seconds": manifest.wall_clock_seconds,
        "created": manifest.created,
        "environment": manifest.environment,
        "meta": manifest.meta,
        "metrics": manifest.metrics,
        "arrays": {key: _array(array) for key, array in manifest.arrays.items()},
        "index": {name: entry._asdict() for name, entry in manifest.index.items()},
    } | counted


def _array(array: ArrayRecord) -> dict[str, Any]:
    optional = {"replicated": True} if array.replicated else {}
    return {"dtype": array.dtype, "shape": array.shape} | optional


@contextlib.contextmanager
def _paused_gc() -> Iterator[None]:
    """No cyclic garbage collection inside: among so many new objects it costs three times the work itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
