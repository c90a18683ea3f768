"""What the tests of the storage room share: arrays of every kind, shards on a real disk, a valid manifest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from mpi_ckpt.layout import Block
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import ArrayRecord, ShardManifest, build_manifest
from mpi_ckpt.storage.records import ITEMSIZE, ShardRecord
from mpi_ckpt.storage.shard_file import BlockToWrite, ShardAttributes, write_shard
from tests.launch import HANG, ROOT

SAVE_ID = "0123456789abcdef"
DTYPES = sorted(ITEMSIZE)
MIB = 1 << 20


def bits(shape: Sequence[int], dtype: str, seed: int = 0) -> np.ndarray:
    """Random bits, NaNs and infinities among them, of any dtype of a shard."""
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    return (raw & 1 if np.dtype(dtype) == bool else raw).view(dtype).reshape(shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in shape and, in one byte order, in every bit."""
    little = [np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")) for x in (a, b)]
    return a.shape == b.shape and little[0].tobytes() == little[1].tobytes()


def whole(array: np.ndarray) -> Block:
    """The block of a global array that has nothing outside."""
    return Block((0,) * array.ndim, array.shape)


def to_write(key: str, array: np.ndarray, start: Sequence[int] | None = None, shape: Sequence[int] | None = None):
    """A block; the whole global array unless `start` and the global `shape` are given."""
    block = Block(tuple(start), array.shape) if start is not None else whole(array)
    return BlockToWrite(key, array, block, tuple(shape) if shape is not None else array.shape)


def save_shard(
    directory: Path, blocks: Sequence[BlockToWrite], values: bytes = b"{}", rank: int = 0, size: int = 1
) -> tuple[Path, ShardRecord]:
    """A published shard and its record."""
    path = directory / names.shard_name(rank)
    record = write_shard(names.tmp(path), blocks, values, ShardAttributes(SAVE_ID, rank, size, 10))
    atomic.publish(names.tmp(path), path)
    return path, record


def flat_manifest(directory: Path, n: int = 1009, size: int = 3, **changes: object) -> ShardManifest:
    """A manifest of real shards: `param` and `master` of n elements dealt to `size` ranks, a 2-d tile, a scalar."""
    records, tiles = [], np.arange(7 * size * 5, dtype="<f8").reshape(7 * size, 5)
    for rank in range(size):
        lo, hi = n * rank // size, n * (rank + 1) // size
        blocks = [
            to_write("optimizer/param", np.arange(lo, hi).astype("<f2"), (lo,), (n,)),
            to_write("optimizer/master", np.arange(lo, hi).astype("<f4"), (lo,), (n,)),
            to_write("tiles", tiles[7 * rank : 7 * rank + 7], (7 * rank, 0), tiles.shape),
        ]
        if rank == 0:
            blocks.append(to_write("scalar", np.array(2.5)))
        records.append(save_shard(directory, blocks, rank=rank, size=size)[1])
    arguments = {
        "step": 10,
        "save_id": SAVE_ID,
        "arrays": {
            "optimizer/param": ArrayRecord("<f2", (n,)),
            "optimizer/master": ArrayRecord("<f4", (n,)),
            "tiles": ArrayRecord("<f8", tiles.shape),
            "scalar": ArrayRecord("<f8", (), replicated=True),
        },
        "index": {"first.weight": (0, (57, 7)), "second.bias": (399, (10,))},
        "meta": {"loss": 3.25, "text": 'ä "quoted"\nline', "nested": {"list": [1, None, True]}},
        "environment": {"numpy": np.__version__},
        "created": "2026-01-01T00:00:00Z",
        "wall_clock_seconds": 4.52,
    }
    return build_manifest(records, **(arguments | changes))


def sha256(path: Path) -> str:
    """What `sha256sum` prints."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path, offset: int) -> None:
    """Change one bit in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@contextlib.contextmanager
def nothing_left_behind(directory: Path) -> Iterator[None]:
    """No file, descriptor or thread more at the end than at the beginning."""

    def look() -> tuple[object, ...]:
        threads = {t for t in threading.enumerate() if t.name.startswith("mpi_ckpt")}
        return sorted(directory.iterdir()), len(os.listdir("/proc/self/fd")), threads

    before = look()
    yield
    assert look() == before


@contextlib.contextmanager
def mounted(directory: Path, kind: str, options: str) -> Iterator[Path]:
    """A small file system of its own; needs root."""
    command = ["mount", "-t", kind, "-o", options, kind, str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def strace_works() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode == 0


needs_strace = pytest.mark.skipif(not strace_works(), reason="strace is not here or not permitted")


def under_strace(tmp_path: Path, code: str, *options: str) -> tuple[str, list[str]]:
    """Run code with `atomic` imported; what it printed, and its calls on paths below `tmp_path`."""
    log = tmp_path.parent / f"{tmp_path.name}.strace"
    program = f"from pathlib import Path\nfrom mpi_ckpt.storage import atomic\nhere = Path({str(tmp_path)!r})\n{code}"
    traced = (
        "--trace=fsync,ftruncate,pwrite64,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,write,close"
    )
    command = ["strace", "-f", "-y", "-o", str(log), traced, *options, sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    calls = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines() if str(tmp_path) in line]
    return run.stdout + run.stderr, calls


def operations(calls: list[str], root: Path) -> list[str]:
    """'fsync a.tmp', 'rename a.tmp a', ... with names relative to `root` ('.' for itself)."""
    found = []
    for call in calls:
        name = re.match(r"\w+", call)[0].removesuffix("at2").removesuffix("at")
        paths = re.findall(re.escape(str(root)) + r"(/[\w./]*)?", call)
        if name not in ("write", "pwrite64"):
            found.append(" ".join([name, *(path.lstrip("/") or "." for path in paths)]))
    return found
