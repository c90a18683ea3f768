"""A state whose every bit says which save it belongs to, and what a rank has of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpi_ckpt import PerRank, Shard, shard_range

N, ROWS, COLUMNS = 1009, 57, 7


def state(rank: int, size: int, step: int, tag: str, *, extra: int = 0) -> dict[str, Any]:
    """The part of `rank` in the state of `step`; `tag` tells two saves of one step apart.

    `extra` float64 more on the last rank make its shard larger.
    """
    rng = np.random.default_rng([step, *tag.encode()])
    flat, field = rng.standard_normal(N), rng.integers(0, 2**16, (ROWS, COLUMNS), dtype=np.uint16)
    (a, b), (c, d) = shard_range(N, size, rank), shard_range(ROWS, size, rank)
    found = {
        "flat": Shard(flat[a:b].copy(), start=(a,), shape=(N,)),
        "grid": {"field": Shard(field[c:d].copy(), start=(c, 0), shape=(ROWS, COLUMNS))},
        "table": rng.standard_normal(COLUMNS),
        "own": PerRank([tag, step, rank]),
        "rng": PerRank(np.random.default_rng([rank, step])),
        "step": step,
        "tag": tag,
    }
    if extra:
        mine = extra if rank == size - 1 else 0
        found["extra"] = Shard(np.full(mine, float(step)), start=(0 if mine else extra,), shape=(extra,))
    return found


def blank(rank: int, size: int) -> dict[str, Any]:
    """Something of the same structure that no save has ever held."""
    found = state(rank, size, 0, "blank")
    found["flat"].array[...], found["table"][...] = np.nan, np.nan
    found["grid"]["field"].array[...] = 0
    return found


def differences(mine: dict[str, Any], rank: int, size: int) -> list[str]:
    """What is not, bit for bit, as in the save that the state says it comes from."""
    expected = state(rank, size, mine["step"], mine["tag"])
    pairs = {
        "flat": (mine["flat"].array.tobytes(), expected["flat"].array.tobytes()),
        "field": (mine["grid"]["field"].array.tobytes(), expected["grid"]["field"].array.tobytes()),
        "table": (mine["table"].tobytes(), expected["table"].tobytes()),
        "own": (mine["own"].value, expected["own"].value),
        "rng": (mine["rng"].value.random(3).tolist(), expected["rng"].value.random(3).tolist()),
    }
    return [key for key, (found, wanted) in pairs.items() if found != wanted]
