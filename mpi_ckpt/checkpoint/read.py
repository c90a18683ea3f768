"""Any region of any array of a committed step, by one process and without MPI: for analysis, export and curiosity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.errors import LayoutMismatch
from mpi_ckpt.layout import Block, overlap
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import BlockRecord, IndexRecord, ShardManifest, flat_arrays, read_manifest
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.places import Directory
from mpi_ckpt.storage.remote_steps import find_remote, remote_manifest, remote_step
from mpi_ckpt.storage.shard_file import check_structure, map_block, read_blocks


def read(
    root: str | Path,
    step: int | None,
    name: str,
    region: slice | Sequence[slice] | None = None,
    *,
    verify: str = "crc32c",
) -> np.ndarray:
    """**Local.** `region` of the array `name` in `step` (None: the newest) below the checkpoints root `root`.

    `root` may be the run's directory, which has it as `checkpoints`, or the URL of a remote tier, s3://bucket/prefix or
    file:///directory: nothing is downloaded but what is asked for.

    `name` is a key of the state ('optimizer/m'), a named parameter of the index ('blocks.0.fc.weight'), which is taken
    from the first array of the flat parameter space, or both ('m:blocks.0.fc.weight'). `region` is a slice for each
    axis, of step 1; None is everything. The result has the array's dtype and the region's shape.

    Only the blocks that overlap the region are touched, and of those only the chunks of 1 MiB that hold it, each
    checked by its crc32c. With verify="none", for a directory only, nothing is checked, and a region within one block
    is not even read but mapped, read-only. Raises NoCheckpoint, LayoutMismatch for a name or region that is not there,
    MissingShard, CorruptShard, InvalidManifest; RemoteFailed and RemoteRefused from a remote tier; ValueError for
    another `verify`.
    """
    directory, manifest = _open(root, step, verify)
    if name in manifest.arrays:
        wanted = _box(name, manifest.arrays[name].shape, region)
        return _read_box(directory, manifest, name, wanted, verify)
    key, entry = _parameter(directory, manifest, name)
    # A parameter is an interval of a flat array: read the part of it from the first to the last element of the region.
    wanted = _box(name, entry.shape, region)
    if wanted.size == 0:
        return np.empty(wanted.shape, manifest.arrays[key].dtype)
    first = int(np.ravel_multi_index(wanted.start, entry.shape)) if entry.shape else 0
    last = int(np.ravel_multi_index(tuple(n - 1 for n in wanted.stop), entry.shape)) if entry.shape else 0
    flat = _read_box(directory, manifest, key, Block((entry.start + first,), (last + 1 - first,)), verify)
    strides = [int(np.prod(entry.shape[axis + 1 :], dtype=int)) * flat.itemsize for axis in range(len(entry.shape))]
    return np.lib.stride_tricks.as_strided(flat, wanted.shape, strides, writeable=flat.flags.writeable)


def _open(root: str | Path, step: int | None, verify: str) -> tuple[Directory, ShardManifest]:
    """Where the shards of the step lie, and its manifest."""
    if not (isinstance(root, str) and "://" in root):
        below = Path(root) / "checkpoints"
        directory = find_committed(below if names.list_steps(below) else Path(root), step)
        return directory, read_manifest(directory)
    if verify == "none":
        raise ValueError(
            "verify: found 'none' with a remote root, expected 'crc32c': only local files can be mapped, "
            "and what comes over a network is always checked"
        )
    store = open_store(root)
    manifest = remote_manifest(store, find_remote(store, step)[-1])
    return remote_step(store, manifest), manifest


def _parameter(directory: Directory, manifest: ShardManifest, name: str) -> tuple[str, IndexRecord]:
    key, _, parameter = name.rpartition(":")
    flat = flat_arrays(manifest.arrays)
    key = key or (flat[0] if flat else "")
    if parameter not in manifest.index or key not in flat:
        known = [*manifest.arrays, *manifest.index]
        raise LayoutMismatch(
            f"{name!r} is neither an array nor a named parameter of the checkpoint",
            path=directory,
            found=repr(name),
            expected=f"one of {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}",
            action="`python -m mpi_ckpt show RUN_DIR STEP` lists the names; 'm:NAME' reads NAME from the array 'm'.",
        )
    return key, manifest.index[parameter]


def _box(name: str, shape: tuple[int, ...], region: slice | Sequence[slice] | None) -> Block:
    slices = () if region is None else (region,) if isinstance(region, slice) else tuple(region)
    good = len(slices) <= len(shape) and all(isinstance(s, slice) and s.step in (None, 1) for s in slices)
    if not good:
        raise LayoutMismatch(
            f"the region cannot be read from {name!r}",
            found=repr(region),
            expected=f"at most {len(shape)} slices of step 1, for shape {shape}",
        )
    bounds = [s.indices(n)[:2] for s, n in zip(slices, shape, strict=False)] + [(0, n) for n in shape[len(slices) :]]
    return Block(tuple(a for a, _ in bounds), tuple(max(0, b - a) for a, b in bounds))


def _read_box(directory: Directory, manifest: ShardManifest, key: str, wanted: Block, verify: str) -> np.ndarray:
    dtype = np.dtype(manifest.arrays[key].dtype)
    pieces: list[tuple[str, BlockRecord]] = []
    for record in manifest.shards:
        blocks = [block for block in record.blocks.get(key, ()) if overlap(block.block, wanted)]
        if blocks:
            check_structure(directory / record.path, record)
            pieces += [(record.path, block) for block in blocks]
    if verify == "none" and len(pieces) == 1 and isinstance(directory, Path):
        path, block = pieces[0]
        return map_block(directory / path, block, dtype)[wanted.within(block.block)]
    out = np.empty(wanted.shape, dtype)
    for path, block in pieces:
        read_blocks(directory / path, [(block, wanted, out)], verify)
    return out
