"""What the golden checkpoint of schema version 1 holds, said by formulas; as a program on two ranks it wrote it, once.

    mpirun -n 2 python -m tests.golden.v1_state DIRECTORY

The files in `v1` are never made again: they stand for those that users have by now.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from mpi_ckpt import PerRank, Shard, shard_range

STEP = 10
META = {"text": "é ∑", "list": [1, 2.5, None, True], "nested": {"a": {}}}
METRICS = {"loss": 0.25}
INDEX = {"first": (0, (3, 5)), "second": (15, (42,))}
NAN = np.uint32(0x7FC01234).view("f4")


def param() -> np.ndarray:
    """float32 [57]: steps of 1/8, with the values that are easily lost."""
    values = np.arange(57, dtype="<f4") / 8 - 3
    values[[0, 20, 40, 56]] = -0.0, NAN, np.inf, 1e-45
    return values


def grid() -> np.ndarray:
    """int16 [5, 7], every element its own."""
    return (np.arange(35).reshape(5, 7) * 937 - 16000).astype("<i2")


def mask() -> np.ndarray:
    """bool [3]."""
    return np.array([True, False, True])


VALUES: dict[str, Any] = {
    "none": None,
    "ints": [0, -1, 2**53 + 1, -(2**100)],
    "floats": [-0.0, 0.1, float("inf"), 5e-324],
    "complex": complex(0.5, -0.0),
    "text": "é \ud800 $",
    "bytes": b"\0\xff",
    "tuple": (1, [2, (3,)]),
    "dict": {1: "a", (2, 3): {4}, None: frozenset({5})},
    "scalar": np.float16(1.5),
    "arrays": [np.array([[1, 2], [3, 4]], ">i4"), np.zeros((0, 3))],
}


def generator(seed: int) -> np.random.Generator:
    """A PCG64 in the middle of its stream, with half a word in its buffer."""
    found = np.random.Generator(np.random.PCG64(seed))
    found.bit_generator.random_raw(5)
    found.bit_generator.state = found.bit_generator.state | {"has_uint32": 1, "uinteger": 12345}
    return found


def twister(seed: int) -> random.Random:
    found = random.Random(seed)
    found.getrandbits(77)
    return found


def state(rank: int, size: int) -> dict[str, Any]:
    """The state of one rank of any number: all values as they were saved."""
    start, stop = shard_range(57, size, rank)
    left, right = shard_range(7, size, rank)
    return {
        "optimizer": {"param": Shard(param()[start:stop], start, 57), "t": np.array(1234567)},
        "grid": Shard(grid()[:, left:right], (0, left), (5, 7)),
        "mask": mask(),
        "values": dict(VALUES),
        "shared rng": twister(3),
        "own": PerRank({"rank": rank}, resize=lambda old, rank, size: old),
        "rng": PerRank(generator(rank), resize=lambda old, rank, size: old[rank % len(old)]),
    }


if __name__ == "__main__":
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer

    comm = MPI.COMM_WORLD
    with Checkpointer(sys.argv[1], comm) as checkpointer:
        checkpointer.save(STEP, state(comm.rank, comm.size), meta=META, metrics=METRICS, index=INDEX)
