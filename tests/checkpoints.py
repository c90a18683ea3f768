"""What the tests of the engine share: data in which every shift shows, one error on all ranks, damage to real files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = [*("?", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")]

# -- arrays ----------------------------------------------------------------------------------------------------------


def bits(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Any bits that the dtype can hold, NaNs with payloads among them; a function of shape, dtype and seed alone."""
    dtype, size = np.dtype(dtype), int(np.prod(shape))
    raw = np.random.default_rng([seed, size]).integers(0, 256, size * dtype.itemsize, np.uint8)
    return (raw & 1 if dtype.kind == "b" else raw).view(dtype).reshape(shape)


def counting(shape: tuple[int, ...], dtype: Any = "<f8") -> np.ndarray:
    """0, 1, 2, ...: an element in another's place shows."""
    return np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)


def poison(array: np.ndarray) -> np.ndarray:
    """The array itself, filled with bytes 0xa5 (True for bool)."""
    array[...] = _sentinel(array.dtype)
    return array


def poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return poison(np.empty(shape, dtype))


def is_poisoned(array: np.ndarray) -> bool:
    """Whether nothing has touched the array since `poison`."""
    return array.tobytes() == np.full(array.shape, _sentinel(array.dtype)).tobytes()


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Equal shape and dtype, byte order aside, and equal bits of every element."""
    little = expected.dtype.newbyteorder("<")
    assert found.dtype.newbyteorder("<") == little
    return found.shape == expected.shape and found.astype(little).tobytes() == expected.astype(little).tobytes()


def _sentinel(dtype: np.dtype) -> np.generic:
    return np.frombuffer(b"\x01" if dtype.kind == "b" else b"\xa5" * dtype.itemsize, dtype)[0]


def exact(value: Any) -> Any:
    """Something equal for two values only if they have the same types and the same bits, at every depth."""
    kind = type(value).__name__
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return kind, [(exact(name), exact(item)) for name, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, sorted((exact(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return kind, [exact(item) for item in value]
    if isinstance(value, float):
        return kind, struct.pack("<d", value)
    if isinstance(value, complex):
        return kind, struct.pack("<dd", value.real, value.imag)
    return kind, value


# -- ranks -----------------------------------------------------------------------------------------------------------


def raised(comm, kind: type[Exception], work: Callable[[], object]) -> Any:
    """The error that `work()` raises: of exactly this kind, and the same text on every rank."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    found = comm.allgather((type(error).__name__, str(error)))
    assert set(found) == {(kind.__name__, str(error))}, f"by rank: {found}"
    return error


def meet(comm) -> None:
    """A barrier that sleeps: ranks that only wait leave the few cores to those that work."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


@contextlib.contextmanager
def first_ranks(comm, n: int) -> Iterator[Any]:
    """The communicator of the first `n` ranks; None on the others, which wait at the end. An error is everyone's."""
    from mpi4py import MPI

    part = comm.Split(0 if comm.rank < n else MPI.UNDEFINED, comm.rank)
    error: Exception | None = None
    try:
        yield part if comm.rank < n else None
    except Exception as caught:
        error = caught
    meet(comm)
    if comm.rank < n:
        part.Free()
    errors = comm.allgather(error and f"{type(error).__name__}: {error}")
    if any(errors):
        raise AssertionError(f"by rank: {errors}") from error


def on_one(comm, work: Callable[[], object]) -> None:
    """Do something on rank 0 while the others wait; they see its effects."""
    if comm.rank == 0:
        work()
    meet(comm)


def holds_on_all_ranks(comm, strategy, examples: int, check: Callable[[Any], None]) -> None:
    """`check(example)` on every rank for the examples that rank 0 draws; it shrinks what fails on any of them."""
    from hypothesis import HealthCheck, Phase, given, settings  # here: it takes longer than most ranks have to live

    def attempt(example) -> None:
        failure = None
        try:
            check(example)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures = comm.allgather(failure)
        assert not any(failures), f"by rank: {failures}"

    if comm.rank:
        while True:
            meet(comm)
            example = comm.bcast(None)
            if example is None:
                return
            with contextlib.suppress(AssertionError):  # rank 0 raises it
                attempt(example[0])

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(strategy)
    def run(example) -> None:
        meet(comm)
        comm.bcast((example,))
        attempt(example)

    try:
        run()
    finally:
        meet(comm)
        comm.bcast(None)


# -- files -----------------------------------------------------------------------------------------------------------


def step_dir(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def shard_file(root: Path, step: int, rank: int) -> Path:
    return step_dir(root, step) / f"rank{rank:05d}.h5"


def flip(path: Path, offset: int) -> None:
    """Invert one bit of the byte at `offset`; negative offsets count from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def manifest_of(root: Path, step: int) -> dict[str, Any]:
    return json.loads((step_dir(root, step) / "manifest.json").read_text())


def write_manifest(root: Path, step: int, document: dict[str, Any]) -> None:
    """Put an edited manifest in place with a digest that is right: sha256 of the canonical JSON of the rest."""
    document = {key: value for key, value in document.items() if key != "manifest_sha256"}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    document["manifest_sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (step_dir(root, step) / "manifest.json").write_text(json.dumps(document, ensure_ascii=False))
