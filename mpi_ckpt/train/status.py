"""Exit statuses of the training program: what a job script can act on.

All ranks leave with the same one. A launcher that combines the statuses of its ranks bit by bit (hydra does), among
them the 9 of ranks that an abort has killed, still reports it: every one above 2 contains the bits of 9. A rank that
is killed by a signal, from outside or by its second one, has the launcher's status for that (9, 137, ...).
"""

from __future__ import annotations

from mpi_ckpt.errors import (
    CorruptShard,
    ExplainedError,
    InvalidManifest,
    LayoutMismatch,
    MissingShard,
    NoCheckpoint,
    RankSilent,
    RemoteRefused,
    UnknownSchema,
    UnusableOption,
    WorldSizeMismatch,
)
from mpi_ckpt.parallel.mesh import MeshError
from mpi_ckpt.train.config import ConfigError
from mpi_ckpt.train.guard import Diverged

FINISHED = 0  # the run is complete, or --stop-at was reached
FAILED = 1  # anything without a status of its own: a full disk, a lock; the message says what
USAGE = 2  # the command line, or what contradicts the stored run or is refused by the remote tier; will fail again
DIVERGED = 73  # more rollbacks than --max-rollbacks allows, or --on-spike stop
PREEMPTED = 75  # asked to leave, checkpoint committed: launch the same line again
HUNG = 77  # no progress, or no word from a rank, for --hang-timeout; launch the same line again
DAMAGED = 79  # a checkpoint is damaged or incomplete and may not be replaced by an older one

_OF = (  # the first that fits
    ((ConfigError, MeshError, UnusableOption, WorldSizeMismatch, LayoutMismatch, UnknownSchema, RemoteRefused), USAGE),
    (Diverged, DIVERGED),
    (RankSilent, HUNG),
    ((CorruptShard, MissingShard, InvalidManifest, NoCheckpoint), DAMAGED),
)


def of(error: BaseException) -> int:
    """The status of a launch that ends with `error`."""
    if isinstance(error, ExplainedError) and error.silent:
        return HUNG
    return next((status for classes, status in _OF if isinstance(error, classes)), FAILED)
