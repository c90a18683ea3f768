"""`view`: one HDF5 file that shows every global array of a step whole, without copying a byte."""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import ShardManifest, read_manifest
from mpi_ckpt.storage.shard_file import check_structure, dataset_path
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import find_whole, reading

if TYPE_CHECKING:
    import h5py

HELP = "make one HDF5 file that shows every array whole, copying nothing"
DESCRIPTION = """Make an HDF5 file of virtual datasets: any HDF5 program sees every global array of the step whole,
under /arrays, although its bytes stay in the shards. By default it is step_NNNNNNNN.view.h5 beside the step's
directory. It names the shards by relative paths: move it together with them and it stays valid.

What is read through a view is NOT VERIFIED. The sizes of the shards are checked when it is made; afterwards, where a
shard is missing, HDF5 gives a fill value without a word: NaN, or the largest number that the type can hold (True for
bool). Delete a view when its step goes; to read verified arrays, use mpi_ckpt.read."""
EXAMPLE = "python -m mpi_ckpt view runs/demo && h5dump -d /arrays/param runs/demo/checkpoints/step_00000020.view.h5"

_FORMAT = "mpi_ckpt view"


def view_path(directory: Path) -> Path:
    """Where the view of a step's directory goes by default: beside it, and no step and no shard by its name."""
    return directory.with_name(f"{directory.name}.view.h5")


def make_view(directory: Path, out: Path) -> None:
    """**Local.** Write the view of the step in `directory` to `out`, durably; an older view there is replaced.

    Raises MissingShard or CorruptShard for a shard of another size, CheckpointError where `out` is somebody else's.
    """
    manifest = read_manifest(directory)
    for shard in manifest.shards:
        check_structure(directory / shard.path, shard)
    _check_replaceable(out)
    # HDF5 looks for relative paths from where the view really lies, hence without symbolic links on the way.
    prefix = os.path.relpath(directory.resolve(), out.parent.resolve())
    atomic.make_dir(out.parent)
    atomic.write_file(out, image(manifest, prefix))


def image(manifest: ShardManifest, prefix: str) -> bytes:
    """The bytes of a view that finds the shards in the directory `prefix`, relative to its own."""
    import h5py  # a quarter of a second, and few verbs need it

    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.attrs["format"] = _FORMAT
        file.attrs["step"] = manifest.step
        file.attrs["save_id"] = manifest.save_id
        file.attrs["unverified"] = "missing shards read as NaN, or as the largest number of the type"
        file.create_group("arrays")
        for key in sorted(manifest.arrays):
            _add(file, manifest, key, prefix)
    return content.getvalue()


def _add(file: h5py.File, manifest: ShardManifest, key: str, prefix: str) -> None:
    import h5py

    array = manifest.arrays[key]
    layout = h5py.VirtualLayout(array.shape, array.dtype)
    for shard in manifest.shards:
        held = shard.blocks.get(key, ())
        for position, block in enumerate(held):
            if block.block.size:
                path = dataset_path(key, position, len(held))
                escaped = (name.replace("%", "%%") for name in (f"{prefix}/{shard.path}", path))  # %b is a pattern
                source = h5py.VirtualSource(*escaped, block.shape, array.dtype)
                layout[tuple(slice(a, b) for a, b in zip(block.start, block.block.stop, strict=True))] = source
    # The same path as in the shards, so that whoever reads one reads the other.
    file.create_virtual_dataset(f"/arrays/{key}", layout, fillvalue=fill_value(np.dtype(array.dtype)))


def fill_value(dtype: np.dtype) -> np.generic:
    """What a view gives where there is nothing: NaN, or the largest value of a type that has no NaN."""
    if dtype.kind == "b":
        return np.bool_(True)
    if dtype.kind in "iu":
        return dtype.type(np.iinfo(dtype).max)
    return dtype.type(complex(np.nan, np.nan) if dtype.kind == "c" else np.nan)


def _check_replaceable(out: Path) -> None:
    """Raise unless `out` is free, or a view."""
    import h5py

    found = None
    if names.is_own_file(out.name) or out.name == names.LOCK:
        found = "a name that the engine uses"
    elif os.path.lexists(out):
        try:
            with h5py.File(out, "r", locking=False) as file:
                found = None if file.attrs.get("format") == _FORMAT else "another HDF5 file"
        except OSError:
            found = "another file"
    if found:
        raise CheckpointError(
            "a view cannot be written here",
            path=out,
            found=found,
            expected="a name that is free, or an older view",
            action="Name another file with --out.",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    text.add_step(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file to make (default: beside the step)")


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Make the view and print its path; the exit status."""
    directory = find_whole(arguments.run_dir, arguments.step)
    out = arguments.out or view_path(directory)
    with reading(directory):
        make_view(directory, out)
    print(out)
    return status.WELL
