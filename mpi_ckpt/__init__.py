"""Sharded, verified, crash-safe checkpoints for MPI programs.

The public names below are loaded when they are first used: importing the package never starts MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi_ckpt.checkpoint.checkpointer import Checkpointer as Checkpointer
    from mpi_ckpt.checkpoint.checkpointer import Found as Found
    from mpi_ckpt.checkpoint.read import read as read
    from mpi_ckpt.checkpoint.sharded import load_sharded as load_sharded
    from mpi_ckpt.checkpoint.sharded import save_sharded as save_sharded
    from mpi_ckpt.checkpoint.sharded import verify_resume as verify_resume
    from mpi_ckpt.checkpoint.state import PerRank as PerRank
    from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions as abort_on_uncaught_exceptions
    from mpi_ckpt.errors import CheckpointError as CheckpointError
    from mpi_ckpt.errors import CorruptShard as CorruptShard
    from mpi_ckpt.errors import DirectoryInUse as DirectoryInUse
    from mpi_ckpt.errors import InvalidManifest as InvalidManifest
    from mpi_ckpt.errors import LayoutMismatch as LayoutMismatch
    from mpi_ckpt.errors import MissingShard as MissingShard
    from mpi_ckpt.errors import NoCheckpoint as NoCheckpoint
    from mpi_ckpt.errors import OutcomeUnknown as OutcomeUnknown
    from mpi_ckpt.errors import RankSilent as RankSilent
    from mpi_ckpt.errors import RemoteFailed as RemoteFailed
    from mpi_ckpt.errors import RemoteRefused as RemoteRefused
    from mpi_ckpt.errors import SaveFailed as SaveFailed
    from mpi_ckpt.errors import StepExists as StepExists
    from mpi_ckpt.errors import UnknownSchema as UnknownSchema
    from mpi_ckpt.errors import UnsupportedState as UnsupportedState
    from mpi_ckpt.errors import UnusableOption as UnusableOption
    from mpi_ckpt.errors import WorldSizeMismatch as WorldSizeMismatch
    from mpi_ckpt.layout import Shard as Shard
    from mpi_ckpt.layout import shard_range as shard_range
    from mpi_ckpt.model.config import ModelConfig as ModelConfig
    from mpi_ckpt.model.gpt import MiniGPT as MiniGPT
    from mpi_ckpt.storage.manifest import ShardManifest as ShardManifest
    from mpi_ckpt.train.corpus import make_corpus as make_corpus

_HOMES = {
    "mpi_ckpt.checkpoint.checkpointer": ("Checkpointer", "Found"),
    "mpi_ckpt.checkpoint.read": ("read",),
    "mpi_ckpt.checkpoint.sharded": ("load_sharded", "save_sharded", "verify_resume"),
    "mpi_ckpt.checkpoint.state": ("PerRank",),
    "mpi_ckpt.comm.abort": ("abort_on_uncaught_exceptions",),
    "mpi_ckpt.errors": (
        "CheckpointError",
        "CorruptShard",
        "DirectoryInUse",
        "InvalidManifest",
        "LayoutMismatch",
        "MissingShard",
        "NoCheckpoint",
        "OutcomeUnknown",
        "RankSilent",
        "RemoteFailed",
        "RemoteRefused",
        "SaveFailed",
        "StepExists",
        "UnknownSchema",
        "UnsupportedState",
        "UnusableOption",
        "WorldSizeMismatch",
    ),
    "mpi_ckpt.layout": ("Shard", "shard_range"),
    "mpi_ckpt.model.config": ("ModelConfig",),
    "mpi_ckpt.model.gpt": ("MiniGPT",),
    "mpi_ckpt.storage.manifest": ("ShardManifest",),
    "mpi_ckpt.train.corpus": ("make_corpus",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
