"""`export`: named parameters as a model that other programs load, in the safetensors format."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpi_ckpt.errors import CheckpointError, LayoutMismatch, UnsupportedState
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import IndexRecord, ShardManifest, flat_arrays, read_manifest
from mpi_ckpt.storage.records import ITEMSIZE
from mpi_ckpt.tools import safetensors_format as st
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import find_whole, reading
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.source import ArraySource, Windows
from mpi_ckpt.tools.writing import check_room

HELP = "write the named parameters as safetensors, in Hugging Face's layout"
DESCRIPTION = """Write the named parameters of a committed step into the directory --out, as Hugging Face's libraries
do: model.safetensors, or where that would be larger than --max-shard-size model-00001-of-0000N.safetensors and
model.safetensors.index.json. Their values are those of the flat parameter array, or of --array (`master`, say), in its
dtype. Every byte is verified by its crc32c on the way; memory stays constant.

An earlier export in --out is replaced: it stays whole until the new one is complete on the disk, and of it exactly
the files that its index names, or that are named as above, are removed. A model that another program wrote is not
touched: that is an error."""
EXAMPLE = "python -m mpi_ckpt export runs/demo --format safetensors --out demo-model --max-shard-size 2GB"

_PIECE_BYTES = 4 << 20
_PRODUCER = "mpi_ckpt"
_FORMATS = ("safetensors",)

Entry = tuple[str, IndexRecord]


@dataclass(frozen=True)
class Exported:
    """What an export wrote: the files of tensors, the number of parameters, and their bytes."""

    files: list[Path]
    parameters: int
    nbytes: int


def export(
    directory: Path,
    out: Path,
    *,
    array: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    advance: Advance = lambda nbytes: None,
) -> Exported:
    """**Local.** Write the named parameters of the step in `directory` into `out`, from the flat array `array`.

    `array` None is the first one of the flat parameter space. Raises LayoutMismatch where there are no named parameters
    or no such array, UnsupportedState for a dtype that the format does not have, CheckpointError for a model of another
    program in `out`, MissingShard, CorruptShard, SaveFailed for want of room, OSError: an earlier export is whole then.
    """
    manifest = read_manifest(directory)
    key = _flat_key(directory, manifest, array)
    source = ArraySource(directory, manifest, key)
    groups = list(split(manifest.index, source.dtype.itemsize, max_shard_bytes))
    nbytes = parameter_bytes(manifest, key)
    old = earlier_export(out)
    atomic.make_dir(out)
    check_room(out, nbytes, "export the parameters")
    metadata = {"format": "pt", "producer": _PRODUCER, "step": str(manifest.step), "save_id": manifest.save_id}
    elements = Windows(source, source.whole)
    files = [out / st.shard_name(number, len(groups)) for number in range(1, len(groups) + 1)]
    atomic.remove(*_cut_short(out))
    try:
        for path, group in zip(files, groups, strict=True):
            _write(names.tmp(path), group, source.dtype, elements, metadata, advance)
        # The new files are complete and durable. Without its index the old model is gone to whoever loads it, and the
        # new one is there with its index, or its only file: nobody ever loads a mix.
        atomic.remove(*old, missing_ok=True)
        for path in files:
            atomic.publish(names.tmp(path), path)
        if len(files) > 1:
            atomic.write_file(out / st.INDEX, _index(files, groups, nbytes))
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            atomic.remove(*map(names.tmp, files), missing_ok=True)
        raise
    return Exported(files, len(manifest.index), nbytes)


def split(index: dict[str, IndexRecord], itemsize: int, max_bytes: int) -> Iterator[list[Entry]]:
    """The parameters in the order of the flat space, in groups of at most `max_bytes`; a larger one stands alone."""
    group: list[Entry] = []
    nbytes = 0
    for name, entry in sorted(index.items(), key=lambda item: (item[1].start, item[1].stop, item[0])):
        more = (entry.stop - entry.start) * itemsize
        if group and nbytes + more > max_bytes:
            yield group
            group, nbytes = [], 0
        group.append((name, entry))
        nbytes += more
    yield group


def parameter_bytes(manifest: ShardManifest, key: str) -> int:
    """Bytes of all named parameters in the array `key`."""
    return sum(entry.stop - entry.start for entry in manifest.index.values()) * ITEMSIZE[manifest.arrays[key].dtype]


def earlier_export(out: Path) -> list[Path]:
    """**Local.** The files of an earlier export in `out`, index first. Raises CheckpointError for another's model."""
    index = out / st.INDEX
    named = set(st.read_index(index).values()) if index.exists() else set()
    present = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    found = [out / name for name in present if name in named or st.is_model_file(name)]
    for path in found:
        if not _is_ours(path):
            raise CheckpointError(
                "there is a model here that this program did not write",
                path=path,
                expected="a directory without a model, or with an earlier export",
                action="Export to another directory, or remove that model.",
            )
    return sorted(found, key=lambda path: path.name != st.INDEX)


def _cut_short(out: Path) -> list[Path]:
    """What an export that was killed has left."""
    temporary = (path for path in out.iterdir() if path.suffix == names.TMP_SUFFIX)
    return [path for path in temporary if st.is_model_file(names.published(path).name)]


def _is_ours(path: Path) -> bool:
    try:
        if path.name == st.INDEX:
            return json.loads(path.read_text(encoding="utf-8"))["metadata"].get("producer") == _PRODUCER
        return st.read_header(path)[1].get("producer") == _PRODUCER
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _flat_key(directory: Path, manifest: ShardManifest, array: str | None) -> str:
    """The flat array that holds the values. Raises LayoutMismatch, UnsupportedState."""
    flat = flat_arrays(manifest.arrays)
    if not manifest.index or (array is not None and array not in flat):
        raise LayoutMismatch(
            f"the array {array!r} does not hold the named parameters" if manifest.index else "nothing has a name here",
            path=directory,
            found=f"named parameters in {', '.join(flat) or 'no array'}" if manifest.index else "no index",
            expected="an index, and a flat array that it names intervals of",
            action="Look with `show`. An application gives names by `index` of Checkpointer.save.",
        )
    key = array or flat[0]
    if manifest.arrays[key].dtype not in st.DTYPES:
        raise UnsupportedState(
            f"the dtype of the array {key!r} has no place in a safetensors file",
            path=directory,
            found=manifest.arrays[key].dtype,
            expected=f"one of {', '.join(st.DTYPES)}",
            action="Export another array.",
        )
    return key


def _write(
    path: Path, group: list[Entry], dtype: np.dtype, elements: Windows, metadata: dict[str, str], advance: Advance
) -> None:
    """One file, complete and durable under a temporary name."""
    buffer = np.empty(_PIECE_BYTES // dtype.itemsize, dtype)
    with atomic.naming(path), path.open("wb") as file:
        file.write(st.header([(name, st.DTYPES[dtype.str], entry.shape) for name, entry in group], metadata))
        for _, entry in group:
            for lo in range(entry.start, entry.stop, buffer.size):
                piece = buffer[: entry.stop - lo]
                elements.copy(lo, piece)
                file.write(piece.data)
                advance(piece.nbytes)
        file.flush()
        atomic.fsync_file(file.fileno(), path)


def _index(files: list[Path], groups: list[list[Entry]], nbytes: int) -> str:
    weight_map = {name: path.name for path, group in zip(files, groups, strict=True) for name, _ in group}
    document = {"metadata": {"total_size": nbytes, "producer": _PRODUCER}, "weight_map": weight_map}
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    text.add_step(parser)
    parser.add_argument("--format", choices=_FORMATS, default=_FORMATS[0], help="of the files (default: %(default)s)")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the model goes")
    parser.add_argument("--array", metavar="KEY", help="the flat array that holds the values (default: the parameters)")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=text.parse_size,
        default="5GB",
        help="of a file, as 500MB or 2GiB (default: %(default)s); a larger parameter has a file of its own",
    )


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Export; the exit status."""
    directory = find_whole(arguments.run_dir, arguments.step)
    manifest = read_manifest(directory)
    nbytes = parameter_bytes(manifest, _flat_key(directory, manifest, arguments.array))
    with reading(directory), progress("export", nbytes) as advance:
        found = export(
            directory,
            arguments.out,
            array=arguments.array,
            max_shard_bytes=arguments.max_shard_size,
            advance=advance,
        )
    for path in found.files:
        print(path)
    print(f"{found.parameters} parameters, {text.size(found.nbytes)}")
    return status.WELL
