"""What the verbs that know a remote tier share: the flag, the step that is meant, and a way around its absence."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.errors import NoCheckpoint
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.storage.object_store import ObjectStore, open_store
from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest


def add_remote(parser: argparse.ArgumentParser) -> None:
    """The required option --remote."""
    parser.add_argument("--remote", metavar="URL", required=True, help=_HELP)


def add_place(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR or, in its place, --remote."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="a run's directory, or that of its checkpoints"
    )
    either.add_argument("--remote", metavar="URL", help=_HELP)


def opened(url: str) -> ObjectStore:
    """**Local.** The store, if it can be used. Raises RemoteFailed, RemoteRefused."""
    store = open_store(url)
    store.check()
    return store


def find_remote(store: ObjectStore, step: int | None) -> list[int]:
    """**Local.** The remotely committed steps, or `step` alone. Raises NoCheckpoint where there is none."""
    committed = committed_remotely(store)
    if not committed or (step is not None and step not in committed):
        raise _nothing(store, step, committed)
    return committed if step is None else [step]


def manifest_of(store: ObjectStore, step: int) -> ShardManifest:
    """**Local.** A step's upload manifest. Raises NoCheckpoint, InvalidManifest, RemoteFailed."""
    manifest = read_upload_manifest(store, step)
    if manifest is None:
        raise _nothing(store, step, committed_remotely(store))
    return manifest


def _nothing(store: ObjectStore, step: int | None, committed: list[int]) -> NoCheckpoint:
    return NoCheckpoint(
        "there is no step in the remote tier" if step is None else f"step {step} is not in the remote tier",
        path=store.url,
        found=f"steps {', '.join(map(str, committed[-12:]))}" if committed else "no upload_manifest.json",
        expected="a step that was uploaded" if step is None else f"step {step}",
        action="Look with `python -m mpi_ckpt ls --remote URL`.",
    )


_HELP = "the remote tier: s3://bucket/prefix (credentials and endpoint from AWS_...) or file:///directory"
