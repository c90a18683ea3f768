"""Every error the engine raises: `CheckpointError`, one child a cause.

A message always answers four questions: where (path, rank), what was found, what was expected, what to do next. The
answers are attributes too, so that a program can decide on them. Exceptions travel between ranks, so each one pickles.
"""

from __future__ import annotations

import errno
from typing import Any, TypeVar

_NEXT_STEP = {  # of an error of the operating system
    errno.ENOSPC: "Free some space, or keep fewer steps.",
    errno.EDQUOT: "Free some space or raise the quota, or keep fewer steps.",
    errno.EACCES: "Give a place that this user may use, or change its permissions.",
    errno.EPERM: "Give a place that this user may use, or change its permissions.",
    errno.EROFS: "Give a directory on a file system that can be written.",
    errno.ENOENT: "See whether the path is right, and there on every node.",
    errno.ENOTDIR: "Name a directory.",
    errno.EIO: "Look at this node's disk and its kernel log.",
    errno.ESTALE: "See whether the network file system is mounted, and its server answers.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
}


class ExplainedError(Exception):
    """An error that says all a user needs; the base of the engine's errors and of the programs' that are built on it.

    `what` is one sentence; `path` and `rank` say where, `found` and `expected` what differs, `action` what to do next.
    `rank` is a rank of the communicator that was passed in. `silent` are the ranks that did not answer, if that is what
    went wrong.
    """

    silent: tuple[int, ...] = ()

    def __init__(
        self,
        what: str,
        *,
        path: object = None,
        rank: int | None = None,
        found: object = None,
        expected: object = None,
        action: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.path = None if path is None else str(path)
        self.rank = rank
        self.found = None if found is None else str(found)
        self.expected = None if expected is None else str(expected)
        self.action = action

    def __str__(self) -> str:
        where = [f"file {self.path}"] if self.path is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        text = self.what + (f" ({', '.join(where)})" if where else "")
        if self.found is not None:
            text += f"; found {self.found}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        return text + (f". {self.action}" if self.action else "")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.__dict__)


def _rebuild(cls: type[ExplainedError], what: str, attributes: dict[str, Any]) -> ExplainedError:
    error = cls(what)
    error.__dict__.update(attributes)
    return error


class CheckpointError(ExplainedError):
    """Base of all errors of the checkpoint engine."""


class SaveFailed(CheckpointError):
    """A save did not commit; the steps committed before it are untouched."""


class OutcomeUnknown(SaveFailed):
    """Nobody can say whether the step is visible: it could not be taken back, or rank 0 is silent. All files stay."""


class RankSilent(CheckpointError):
    """A rank did not answer in time, or was interrupted while it decided; what it decided is unknown."""


class NoCheckpoint(CheckpointError):
    """The step asked for, or any step at all, does not exist."""


class WorldSizeMismatch(CheckpointError):
    """The checkpoint was written by another number of ranks than reads it."""


class MissingShard(CheckpointError):
    """A shard file that the manifest lists is not there."""


class CorruptShard(CheckpointError):
    """A shard's size, digest or structure is not what the manifest says."""


class LayoutMismatch(CheckpointError):
    """Key, dtype, shape or decomposition of the state differ from the checkpoint's, or do not tile an array."""


class InvalidManifest(CheckpointError):
    """The manifest is damaged: its own digest, a field or a value is not what it must be."""


class UnknownSchema(InvalidManifest):
    """The manifest, or a file it names, was written by a newer version of the format."""


class UnsupportedState(CheckpointError):
    """The state holds something that no file of ours can bring back as it is."""


class StepExists(CheckpointError):
    """The step is committed already and `overwrite` was not asked for."""


class UnusableOption(CheckpointError, ValueError):
    """An option cannot be used as it was given: there is no such value, or two of them exclude each other."""


class DirectoryInUse(CheckpointError):
    """Another launch writes to this checkpoint directory."""


class RemoteFailed(CheckpointError):
    """The remote tier did not do what was asked: out of reach, out of order, or in another's hands."""


class RemoteRefused(RemoteFailed):
    """The remote tier refuses for a reason that only the user can change: credentials, bucket, address, package."""


E = TypeVar("E", bound=ExplainedError)


def from_os_error(error: OSError, kind: type[E], rank: int | None = None) -> E:
    """An error of the operating system in this project's form: its text, its path, and what to do next."""
    text = f"[Errno {error.errno}] {error.strerror}" if error.errno else str(error)  # the path comes after it
    if error.filename2:
        text += f", renaming to {error.filename2}"
    action = _NEXT_STEP.get(error.errno or 0)
    return kind(f"{type(error).__name__}: {text}", path=error.filename, rank=rank, action=action)
