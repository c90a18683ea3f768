"""The safetensors format: a header length (8 bytes, little-endian), a JSON header, then the tensors' bytes.

https://github.com/huggingface/safetensors#format: the header maps names to dtype, shape and the interval of bytes
after the header; the intervals leave no hole; `__metadata__` maps strings to strings. Several files make one model by
an index `model.safetensors.index.json` that maps each name to its file, as Hugging Face's libraries write and read
it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpi_ckpt.errors import CheckpointError, CorruptShard, UnsupportedState

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_MAX_HEADER = 100_000_000  # bytes, as the reference implementation has it

# NumPy's names (as in the manifest) of the types that the format has. NumPy has no BF16: see `import`.
DTYPES = {
    **{"|b1": "BOOL", "|i1": "I8", "<i2": "I16", "<i4": "I32", "<i8": "I64"},
    **{"|u1": "U8", "<u2": "U16", "<u4": "U32", "<u8": "U64", "<f2": "F16", "<f4": "F32", "<f8": "F64"},
}
ITEMSIZE = {"BF16": 2, **{name: int(dtype[2:]) for dtype, name in DTYPES.items()}}


class Tensor(NamedTuple):
    """An entry of a header: name, dtype as the format names it, shape, and the file's bytes begin..end-1."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def shard_name(number: int, count: int) -> str:
    """The file `number` (from 1) of `count` that make a model."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def is_model_file(name: str) -> bool:
    """Whether a file of this name is part of a model, by the naming of Hugging Face's libraries."""
    return name in (SINGLE, INDEX) or _SHARD.fullmatch(name) is not None


def header(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before those of `tensors` (name, dtype, shape), which follow in this order; a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEMSIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """**Local.** The tensors of a file in the order of their bytes, and its metadata.

    Raises CorruptShard where it is no safetensors file, or cut short; UnsupportedState for a dtype that is not in
    ITEMSIZE; OSError.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise _corrupt(path, f"{size} bytes, a header of {length}", "a header within the file")
        text = file.read(length)
    try:
        document = json.loads(text)
        metadata = dict(document.pop("__metadata__", {}))
        tensors = [_tensor(name, entry, 8 + length) for name, entry in document.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}", "a header of JSON objects") from None
    for tensor in tensors:
        if tensor.dtype not in ITEMSIZE:
            raise UnsupportedState(
                f"the tensor {tensor.name!r} has a dtype that no array here can hold",
                path=path,
                found=tensor.dtype,
                expected=f"one of {', '.join(ITEMSIZE)}",
                action="Convert the model first.",
            )
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    at = 8 + length
    for tensor in tensors:
        if tensor.begin != at or tensor.end - at != math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]:
            found = f"{tensor.name!r}, {tensor.dtype} {list(tensor.shape)} in bytes {tensor.begin} to {tensor.end}"
            raise _corrupt(path, found, f"the bytes of its shape, from {at} on")
        at = tensor.end
    if at != size:
        raise _corrupt(path, f"{size} bytes", f"{at} bytes, as the header says")
    return tensors, metadata


def read_index(path: Path) -> dict[str, str]:
    """**Local.** The file of each tensor, plain names. Raises CorruptShard; OSError."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        good = all(type(name) is str and name == Path(name).name and name not in ("", "..") for name in files.values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}", "a JSON object with a `weight_map`") from None
    if not good:
        raise _corrupt(path, "a file that is no plain name", "names of files beside the index")
    return dict(files)


def _tensor(name: str, entry: Any, base: int) -> Tensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(n) is not int or n < 0 for n in (begin, end, *shape)) or type(entry["dtype"]) is not str:
        raise ValueError(f"tensor {name!r} has no valid place")
    return Tensor(name, entry["dtype"], shape, base + begin, base + end)


def _corrupt(path: Path, found: str, expected: str) -> CheckpointError:
    return CorruptShard(
        "a safetensors file cannot be read",
        path=path,
        found=found,
        expected=expected,
        action="Fetch or export it again.",
    )
