"""Checkpoints for the tests of the verbs, saved and restored by real ranks.

python -m tests.programs.tool_states save ROOT           steps 10, 20, 30
python -m tests.programs.tool_states restore ROOT STEP   on any number of ranks that the step says it is for
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from mpi_ckpt import PerRank, Shard, shard_range

N, ROWS, COLUMNS, FEW = 1009, 57, 7, 3
INDEX = {
    "wte.weight": (0, (57, 7)),
    "blocks.0.fc.weight": (399, (20, 20)),
    "blocks.0.fc.bias": (799, (20,)),
    "scale": (819, ()),
    "nothing": (820, (0, 5)),
    "head.weight": (820, (189,)),
}
FLAT = {"param": "<f2", "master": "<f4", "m": "<f4"}


def arrays(step: int) -> dict[str, np.ndarray]:
    """Every global array of a step, as one process sees it."""
    rng = np.random.default_rng(step)
    found = {key: rng.standard_normal(N).astype(dtype) for key, dtype in FLAT.items()}
    found["m"][57:60] = [np.nan, -0.0, np.inf]
    return found | {
        "field/tiles": rng.standard_normal((ROWS, COLUMNS)),
        "field/mask": rng.integers(0, 2, (ROWS, COLUMNS)).astype("?"),
        "field/wave": (rng.standard_normal((ROWS, 2)) + 1j).astype("<c8"),
        "few": rng.standard_normal(FEW) + 1j * np.arange(FEW),
        "interleaved": rng.integers(-(2**63), 2**63, N),
        "table": rng.standard_normal((COLUMNS, 2)),
        "scalar": np.array(step, "<i4"),
        "empty": np.empty((0, 4), "<u2"),
    }


def blocks(key: str, shape: tuple[int, ...], rank: int, size: int) -> list[tuple[slice, ...]] | None:
    """What `rank` of `size` holds of an array when it saves; None for replicated ones."""
    if key in ("table", "scalar", "empty"):
        return None
    if key == "field/tiles":  # a process grid of two columns where the number of ranks allows it
        across = 2 if size % 2 == 0 else 1
        rows, columns = divmod(rank, across)
        return [(slice(*shard_range(ROWS, size // across, rows)), slice(*shard_range(COLUMNS, across, columns)))]
    if key == "interleaved":  # two intervals a rank
        return [(slice(*shard_range(N, 2 * size, part)),) for part in (rank, rank + size)]
    return [(slice(*shard_range(shape[0], size, rank)), *map(slice, shape[1:]))]


def state(step: int, rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "progress": {"step": step, "large": 2**70, "nan": float("nan"), "text": 'ä "b"'},
        "own": PerRank([step, rank], resize=lambda old, rank, size: [*old, "resized", rank, size]),
        "rng": PerRank(np.random.default_rng([step, rank]), resize=_reseed),
    }
    for key, array in arrays(step).items():
        held = blocks(key, array.shape, rank, size)
        *levels, name = key.split("/")
        parent = found
        for level in levels:
            parent = parent.setdefault(level, {})
        if held is None:
            parent[name] = array
        else:
            shards = [Shard(array[index], [s.start or 0 for s in index], array.shape) for index in held]
            parent[name] = shards if len(shards) > 1 else shards[0]
    return found


def _reseed(old: list[Any], rank: int, size: int) -> np.random.Generator:
    return np.random.default_rng([*old[0].build().integers(2**63, size=4).tolist(), rank, size])


def shards_of(tree: dict[str, Any], prefix: str = "") -> dict[str, list[Any]]:
    """Arrays and shards by key."""
    found: dict[str, list[Any]] = {}
    for name, leaf in tree.items():
        if isinstance(leaf, dict):
            found |= shards_of(leaf, f"{prefix}{name}/")
        elif isinstance(leaf, (np.ndarray, Shard)):
            found[prefix + name] = [leaf]
        elif isinstance(leaf, list) and isinstance(leaf[0], Shard):
            found[prefix + name] = leaf
    return found


def restored_wrongly(comm: Any, root: Path, step: int) -> list[str]:
    """What is not as it was saved, after an ordinary restore of `step` by these ranks."""
    from mpi_ckpt import Checkpointer

    mine = state(0, comm.rank, comm.size)
    mine["own"].value, mine["rng"].value = None, np.random.default_rng(1)
    with Checkpointer(root, comm, read_only=True) as checkpointer:
        checkpointer.restore(mine, step)
    wrong, expected, old = [], arrays(step), 4
    for key, held in shards_of(mine).items():
        for leaf in held:
            array = leaf.array if isinstance(leaf, Shard) else leaf
            start = leaf.block.start if isinstance(leaf, Shard) else (0,) * leaf.ndim
            part = expected[key][tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))]
            wrong += [key] if array.tobytes() != np.ascontiguousarray(part).tobytes() else []
    wrong += ["progress"] if repr(mine["progress"]) != repr(state(step, 0, 1)["progress"]) else []
    own, rng = [step, comm.rank], np.random.default_rng([step, comm.rank])
    if comm.size != old:
        own = [*([step, rank] for rank in range(old)), "resized", comm.rank, comm.size]
        seed = np.random.default_rng([step, 0]).integers(2**63, size=4).tolist()
        rng = np.random.default_rng([*seed, comm.rank, comm.size])
    wrong += ["own"] if mine["own"].value != own else []
    wrong += ["rng"] if mine["rng"].value.random(3).tolist() != rng.random(3).tolist() else []
    return wrong


def main(verb: str, root: str, *step: str) -> None:
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer
    from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions

    comm = MPI.COMM_WORLD
    abort_on_uncaught_exceptions(comm)
    if verb == "save":
        with Checkpointer(root, comm, keep=None, async_io=False) as checkpointer:
            for number in (10, 20, 30):
                about = {"meta": {"cursor": 16 * number, "run": "tools"}, "metrics": {"loss": 100 / number}}
                checkpointer.save(number, state(number, comm.rank, comm.size), index=INDEX, **about)
    else:
        wrong = comm.allgather(restored_wrongly(comm, Path(root), int(step[0])))
        if any(wrong):
            raise SystemExit(f"by rank, not as saved: {wrong}")
        if comm.rank == 0:
            print(f"{comm.size} ranks restored step {step[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
