"""The application's state as the engine sees it: a dict walked into named leaves, each of one of five kinds.

    Shard, or a list of them     this rank's blocks of a global array     in this rank's file
                                 (a rank that holds none of it passes an empty Shard)
    NumPy array                  replicated: equal on every rank          in rank 0's file, once
    plain value                  replicated: equal on every rank          in rank 0's file, once
    random generator             replicated, set in place on restore      in rank 0's file, once
    PerRank                      each rank's own value or generator       in this rank's file

Nested dicts are walked, and their keys joined by "/", as long as there is anything but plain values below them; a dict
of plain values alone is one plain value, replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpi_ckpt.checkpoint import values
from mpi_ckpt.errors import LayoutMismatch, UnsupportedState
from mpi_ckpt.layout import Shard
from mpi_ckpt.storage.records import MAX_AXES

State = dict[str, Any]


class PerRank:
    """A value that every rank has its own of: a plain value, or a random generator, which is read at each save.

    `resize(old_values, rank, size)` gives the value for `rank` of `size` when a checkpoint of another number of ranks
    is restored (`old_values` in the order of the old ranks; of a generator, its saved states); without it such a
    restore raises LayoutMismatch. It returns a plain value, or for a generator a saved state or a new generator.
    """

    __slots__ = ("resize", "value")

    def __init__(self, value: Any, *, resize: Callable[[list[Any], int, int], Any] | None = None) -> None:
        self.value = value
        self.resize = resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@dataclass
class Leaves:
    """A state, walked. `values` has the dict that holds each leaf and its name there, so that it can be replaced."""

    shards: dict[str, list[Shard]] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, tuple[State, str]] = field(default_factory=dict)
    per_rank: dict[str, PerRank] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, str]:
        """What each key is, in a word."""
        return (
            dict.fromkeys(self.shards, "sharded array")
            | dict.fromkeys(self.arrays, "replicated array")
            | dict.fromkeys(self.values, "plain value")
            | dict.fromkeys(self.per_rank, "value per rank")
        )

    def select(self, keys: Sequence[str] | None) -> Leaves:
        """The leaves at `keys` or below them; all for None. Raises LayoutMismatch for a key that names nothing."""
        if keys is None:
            return self
        kinds = self.kinds
        for key in keys:
            if not any(_below(name, key) for name in kinds):
                raise LayoutMismatch(
                    "a key to restore is not in the state",
                    found=repr(key),
                    expected=f"one of {', '.join(sorted(kinds))}",
                    action="Pass keys of the state dict, with '/' between the levels.",
                )

        def chosen(leaves: dict[str, Any]) -> dict[str, Any]:
            return {name: leaf for name, leaf in leaves.items() if any(_below(name, key) for key in keys)}

        return Leaves(chosen(self.shards), chosen(self.arrays), chosen(self.values), chosen(self.per_rank))


def walk(state: State) -> Leaves:
    """**Local.** The leaves of `state`. Raises UnsupportedState for a key or leaf that cannot be saved."""
    if not isinstance(state, dict):
        raise UnsupportedState("a state must be a dict", found=type(state).__name__, expected="dict of named leaves")
    leaves = Leaves()
    for key, parent, name, leaf in _walk(state, ""):
        if isinstance(leaf, Shard):
            leaves.shards[key] = [leaf]
        elif _is_shard_list(leaf):
            leaves.shards[key] = list(leaf)
        elif isinstance(leaf, PerRank):
            leaves.per_rank[key] = leaf
        elif isinstance(leaf, np.ndarray):
            leaves.arrays[key] = leaf
        else:
            leaves.values[key] = parent, name
    for key, shards in leaves.shards.items():
        _check_shards(key, shards)
    for key, array in leaves.arrays.items():
        check_dtype(key, array)
    return leaves


def _walk(tree: State, prefix: str) -> Iterator[tuple[str, State, str, Any]]:
    for name, leaf in tree.items():
        key = f"{prefix}{name}"
        if type(name) is not str or not name or "/" in name or not name.isprintable() or name in (".", ".."):
            raise UnsupportedState(
                "a key of the state cannot name a dataset",
                found=repr(name) + (f" below {prefix.rstrip('/')!r}" if prefix else ""),
                expected="a non-empty, printable str without '/', neither '.' nor '..'",
                action="Rename the key.",
            )
        if isinstance(leaf, dict) and _is_tree(key, leaf):
            yield from _walk(leaf, key + "/")
        else:
            yield key, tree, name, leaf


def _is_tree(key: str, leaf: dict[Any, Any]) -> bool:
    try:
        return _holds_more_than_values(leaf)
    except RecursionError:
        raise UnsupportedState(
            f"the dict at {key!r} is nested too deeply",
            found="a dict that holds itself, or hundreds of levels",
            expected="a tree of dicts",
            action="Break the cycle.",
        ) from None


def _holds_more_than_values(tree: dict[Any, Any]) -> bool:
    return any(
        isinstance(leaf, (Shard, PerRank, np.ndarray, *values.Generator))
        or _is_shard_list(leaf)
        or (isinstance(leaf, dict) and _holds_more_than_values(leaf))
        for leaf in tree.values()
    )


def _is_shard_list(leaf: Any) -> bool:
    return isinstance(leaf, (list, tuple)) and len(leaf) > 0 and all(isinstance(item, Shard) for item in leaf)


def _check_shards(key: str, shards: list[Shard]) -> None:
    for shard in shards:
        check_dtype(key, shard.array)
        if stored_dtype(shard.array) != stored_dtype(shards[0].array) or shard.shape != shards[0].shape:
            raise LayoutMismatch(
                f"the shards listed at {key!r} belong to different arrays",
                found=f"{shard}",
                expected=f"dtype {stored_dtype(shards[0].array)} and global shape {shards[0].shape}",
                action="Give shards of one global array in one list.",
            )


def check_dtype(key: str, array: np.ndarray) -> None:
    """**Local.** Raise UnsupportedState unless a shard file can hold `array` exactly."""
    dtype = array.dtype
    plain = dtype.kind in "biufc" and dtype.char not in "gG" and not isinstance(array, np.ma.MaskedArray)
    if not plain or array.ndim > MAX_AXES:
        raise UnsupportedState(
            f"the array at {key!r} has a type that cannot be saved exactly",
            found=f"{type(array).__name__} of {dtype} with {array.ndim} axes",
            expected="bool, integers, floats of 2, 4 or 8 bytes, complex of 8 or 16 bytes; no mask; "
            f"at most {MAX_AXES} axes",
            action="Convert the array, or save what it consists of.",
        )


def stored_dtype(array: np.ndarray) -> str:
    """**Local.** The dtype as files and manifest name it: little-endian, '<f4' say."""
    return array.dtype.newbyteorder("<").str


def _below(name: str, key: str) -> bool:
    return name == key or name.startswith(key.rstrip("/") + "/")
