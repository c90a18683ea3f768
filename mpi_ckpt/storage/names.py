"""The one room for file names: what lies where below a checkpoints root, and which files are ours.

    <root>/writer.lock
    <root>/step_00000010/rank00000.h5 ... manifest.json [manifest.damaged.json] [pinned]

    <local>/step_00000010/rank00000.h5 rank00000.parity rank00000.redundancy.json manifest.json      on every node

    <remote>/step_00000010/<save id>/rank00000.h5 ...     <remote>/step_00000010/upload_manifest.json

A shard of a step that is saved again carries the save id, `rank00002-<id>.h5`; a file that is being written ends in
`.tmp`. A step is committed if and only if its `manifest.json` exists. Names are parsed strictly: `step_10` or
`step_0000001x` is somebody else's, and nothing of ours ever removes it.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

MANIFEST = "manifest.json"
UPLOAD_MANIFEST = "upload_manifest.json"
DAMAGED_MANIFEST = "manifest.damaged.json"
PINNED = "pinned"
LOCK = "writer.lock"
TMP_SUFFIX = ".tmp"

_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")  # 18 digits stay below 2^63
_SHARD = re.compile(r"rank([0-9]{5}|[1-9][0-9]{5,8})(?:-([0-9a-f]{8,64}))?\.h5")
_COMPANION = re.compile(r"(.+)\.(?:parity|redundancy\.json)")
_SAVE_ID = re.compile(r"[0-9a-f]{8,64}")


def new_save_id() -> str:
    """16 random hexadecimal digits that tell one save from every other."""
    return secrets.token_hex(8)


def is_save_id(text: str) -> bool:
    """Whether `text` may stand as a save id: 8 to 64 lower-case hexadecimal digits."""
    return _SAVE_ID.fullmatch(text) is not None


def step_dir(root: Path, step: int) -> Path:
    """`<root>/step_00000010` for 10; more digits where the number has more than eight."""
    return Path(root) / step_name(step)


def step_name(step: int) -> str:
    """`step_00000010` for 10."""
    if not 0 <= step < 10**18:
        raise ValueError(f"a step is an integer from 0 to 10**18 - 1, not {step}")
    return f"step_{step:08d}"


def parse_step(name: str) -> int | None:
    """The step that a directory name stands for, or None when the name is not ours."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def shard_name(rank: int, save_id: str | None = None) -> str:
    """`rank00002.h5`, or `rank00002-<save id>.h5` where a step is saved again."""
    if not 0 <= rank < 10**9 or (save_id is not None and not is_save_id(save_id)):
        raise ValueError(f"no shard can be named after rank {rank} and save id {save_id!r}")
    return f"rank{rank:05d}.h5" if save_id is None else f"rank{rank:05d}-{save_id}.h5"


def parse_shard(name: str) -> tuple[int, str | None] | None:
    """`(rank, save id or None)` of a shard's plain file name, or None when the name is not ours."""
    match = _SHARD.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def tmp(path: Path) -> Path:
    """The name under which `path` is written before it is published."""
    return Path(path).with_name(Path(path).name + TMP_SUFFIX)


def published(path: Path) -> Path:
    """The inverse of `tmp`; a final name stays as it is."""
    return Path(path).with_name(Path(path).name.removesuffix(TMP_SUFFIX))


def manifest_path(directory: Path) -> Path:
    """The file whose existence commits the step of `directory`."""
    return Path(directory) / MANIFEST


def is_own_file(name: str) -> bool:
    """Whether a file of this name in a step's directory is ours to remove. Foreign files are left alone."""
    name = name.removesuffix(TMP_SUFFIX)
    return name in (MANIFEST, DAMAGED_MANIFEST, PINNED) or parse_shard(protected(name)) is not None


def protected(name: str) -> str:
    """`rank00002.h5` for the files of its redundancy, `rank00002.parity` and `.redundancy.json`; others as they are."""
    match = _COMPANION.fullmatch(name)
    return f"{match[1]}.h5" if match else name


def own_files(directory: Path) -> list[Path]:
    """Our files in a step's directory, sorted by name; [] where it does not exist."""
    try:
        with os.scandir(directory) as entries:
            return sorted(Path(e.path) for e in entries if is_own_file(e.name) and not e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def list_steps(root: Path) -> list[int]:
    """The committed steps below `root`, in ascending numeric order; [] where `root` does not exist.

    One scan of the root and one look into each step: 1,000 steps take a few milliseconds.
    """
    return [step for step, path in _step_dirs(root) if os.path.lexists(f"{path}/{MANIFEST}")]


def list_uncommitted(root: Path) -> list[int]:
    """The steps whose directory holds no manifest: leftovers, a save under way, or set aside as damaged."""
    return [step for step, path in _step_dirs(root) if not os.path.lexists(f"{path}/{MANIFEST}")]


def _step_dirs(root: Path) -> list[tuple[int, str]]:
    """Step and path of its directory, sorted by step. No symbolic link is ours: pruning would reach through it."""
    try:
        with os.scandir(root) as entries:
            found = [(parse_step(e.name), e) for e in entries]
            return sorted((s, e.path) for s, e in found if s is not None and e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
