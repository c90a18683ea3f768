"""`import`: a model in the safetensors format as a checkpoint, so that it can be restored on any number of ranks."""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from mpi_ckpt.checkpoint.documents import Document
from mpi_ckpt.errors import CorruptShard, NoCheckpoint, UnsupportedState
from mpi_ckpt.layout import Block, shard_range
from mpi_ckpt.storage.manifest import ArrayRecord
from mpi_ckpt.storage.shard_file import BlockToWrite
from mpi_ckpt.tools import safetensors_format as st
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import new_root
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.reshard import counted
from mpi_ckpt.tools.source import Windows
from mpi_ckpt.tools.writing import NewStep, write_step

HELP = "make a checkpoint of a model in the safetensors format"
DESCRIPTION = """Make a checkpoint of the tensors in SOURCE: a directory as `export` or Hugging Face's libraries write
it, or a single file. The checkpoint has one step (--step) for one rank (--ranks). It holds one flat array, `param`
(--array), in which the tensors lie one after the other in the order of the files and of their bytes, and the index that
names them: what `export` needs to write them again, and an application to restore its parameters, on any number of
ranks with world_size="any" and keys=["param"]. There are no values and no optimizer state; `meta` says what was
imported.

All tensors must have one dtype, for nothing is cast. With --widen, floating types are widened, which is exact: to
float64 if there is any, otherwise to float32; NumPy has no bfloat16, so that a model in it needs --widen too."""
EXAMPLE = "python -m mpi_ckpt import demo-model --out runs/imported/checkpoints"

_NUMPY = {name: np.dtype(dtype) for dtype, name in st.DTYPES.items()}
_FLOATS = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True)
class Part:
    """A tensor and the file that holds it."""

    path: Path
    tensor: st.Tensor

    @property
    def numel(self) -> int:
        """Number of elements."""
        return (self.tensor.end - self.tensor.begin) // st.ITEMSIZE[self.tensor.dtype]


@dataclass(frozen=True)
class Model:
    """The tensors of a model in the order of their files and bytes, and what the files say of themselves."""

    parts: list[Part]
    metadata: dict[str, str]


def open_model(source: Path) -> Model:
    """**Local.** Read the headers. Raises NoCheckpoint, CorruptShard, UnsupportedState for a dtype; OSError."""
    expected = None
    if source.is_dir() and not (source / st.SINGLE).exists() and (source / st.INDEX).exists():
        expected = st.read_index(source / st.INDEX)
        files = [source / name for name in sorted(set(expected.values()))]
    else:
        files = [source / st.SINGLE if source.is_dir() else source]
    parts: list[Part] = []
    metadata: dict[str, str] = {}
    for path in files:
        if not path.exists():
            raise NoCheckpoint(
                "there is no model here",
                path=path,
                found="no such file",
                expected=f"{st.SINGLE}, or {st.INDEX} and the files that it names",
                action="Name a directory that `export` or Hugging Face's libraries have written, or a single file.",
            )
        tensors, more = st.read_header(path)
        parts += [Part(path, tensor) for tensor in tensors]
        metadata |= more
    found = {part.tensor.name: part.path.name for part in parts}
    if len(found) != len(parts) or found != (expected or found):
        raise CorruptShard(
            "the files of the model do not hold the tensors that its index names",
            path=source,
            found=f"{len(parts)} tensors in {len(files)} files",
            expected=f"each of {len(expected or found)} names once, in its file",
            action="Fetch or export it again.",
        )
    return Model(parts, metadata)


def import_model(
    source: Path,
    out: Path,
    *,
    step: int = 0,
    ranks: int = 1,
    key: str = "param",
    widen: bool = False,
    advance: Advance = lambda nbytes: None,
) -> Path:
    """**Local.** Commit the model in `source` as `step` below the checkpoints root `out`; the step's directory.

    Raises what `open_model` and `write_step` raise, and UnsupportedState for dtypes that do not fit together.
    """
    model = open_model(source)
    flat = FlatModel(model.parts, _common_dtype(source, model.parts, widen))
    array = ArrayRecord(flat.dtype.str, flat.shape)

    def contents(rank: int) -> tuple[list[BlockToWrite], Document]:
        start, stop = shard_range(flat.shape[0], ranks, rank)
        block = Block((start,), (stop - start,))
        replicated: Document = {} if rank else {"replicated": {}}
        content = counted(Windows(flat, block).streamed(), advance)
        return [BlockToWrite(key, content, block, flat.shape)], {"per_rank": {}} | replicated

    dtypes = sorted({part.tensor.dtype for part in model.parts})
    files = sorted({part.path.name for part in model.parts})
    new = NewStep(
        step=step,
        world_size=ranks,
        nbytes=flat.shape[0] * flat.dtype.itemsize,
        arrays={key: array},
        contents=contents,
        index={p.tensor.name: (start, p.tensor.shape) for p, start in zip(model.parts, flat.starts, strict=False)},
        meta={"imported": {"files": files, "dtypes": dtypes, "metadata": model.metadata}},
    )
    return write_step(out, new)


class FlatModel:
    """The tensors of a model as one flat array of `dtype`, read piece by piece."""

    def __init__(self, parts: Sequence[Part], dtype: np.dtype) -> None:
        self.dtype = dtype
        self.starts = [0, *accumulate(part.numel for part in parts)]
        self.shape = (self.starts[-1],)
        self._parts = parts

    def read_run(self, block: Block, lo: int, out: np.ndarray) -> None:
        """**Local.** Elements lo.. of `block` into all of `out`. Raises CorruptShard where a file is shorter now."""
        position = block.start[0] + lo
        while out.size:
            i = bisect_right(self.starts, position) - 1  # the last one that starts here or before: not an empty one
            part = self._parts[i]
            first = position - self.starts[i]
            piece = out[: part.numel - first]
            _read(part, first, piece)
            position, out = position + piece.size, out[piece.size :]


def _read(part: Part, first: int, out: np.ndarray) -> None:
    """Elements first.. of a tensor into all of `out`, widened if need be."""
    saved = np.dtype("<u2") if part.tensor.dtype == "BF16" else _NUMPY[part.tensor.dtype]
    raw = np.fromfile(part.path, saved, out.size, offset=part.tensor.begin + first * saved.itemsize)
    if raw.size < out.size:
        found, expected = f"{raw.size} elements from {first} on", f"{out.size}"
        raise CorruptShard("a safetensors file has become shorter", path=part.path, found=found, expected=expected)
    if part.tensor.dtype == "BF16":  # a float32 without its lower half
        raw = (raw.astype("<u4") << 16).view("<f4")
    out[...] = raw


def _common_dtype(source: Path, parts: Sequence[Part], widen: bool) -> np.dtype:
    """The dtype of the flat array. Raises UnsupportedState unless it can hold every tensor, as the user allows."""
    dtypes = sorted({part.tensor.dtype for part in parts})
    if len(dtypes) == 1 and dtypes[0] in _NUMPY:
        return _NUMPY[dtypes[0]]
    if dtypes and widen and all(dtype in _FLOATS for dtype in dtypes):
        return np.dtype("<f8" if "F64" in dtypes else "<f4")
    raise UnsupportedState(
        "the tensors of the model do not make one array" if dtypes else "the model has no tensors",
        path=source,
        found=f"dtypes {', '.join(dtypes)}" if dtypes else "nothing",
        expected="one dtype that NumPy has",
        action="Floating types can be widened, exactly, by --widen; import others in a model of their own.",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a directory with a model, or a .safetensors file")
    parser.add_argument("--out", metavar="RUN_DIR", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument("--step", metavar="STEP", type=text.natural, default=0, help="its step (default: 0)")
    parser.add_argument("--ranks", metavar="M", type=text.positive, default=1, help="for this many ranks (default: 1)")
    parser.add_argument("--array", metavar="KEY", default="param", help="the flat array's key (default: %(default)s)")
    parser.add_argument("--widen", action="store_true", help="widen floating types to float32 or float64")


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Import; the exit status."""
    model = open_model(arguments.source)
    dtype = _common_dtype(arguments.source, model.parts, arguments.widen)
    total = sum(part.numel for part in model.parts)
    with progress("import", total * dtype.itemsize) as advance:
        written = import_model(
            arguments.source,
            new_root(arguments.out),
            step=arguments.step,
            ranks=arguments.ranks,
            key=arguments.array,
            widen=arguments.widen,
            advance=advance,
        )
    print(f"{written}: {len(model.parts)} parameters, {text.size(total * dtype.itemsize)}")
    return status.WELL
