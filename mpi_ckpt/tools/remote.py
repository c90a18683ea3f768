"""What the verbs that know a remote tier share: the flag, and the store that it names."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.errors import RemoteRefused, UnusableOption
from mpi_ckpt.storage.object_store import ObjectStore, check_url, open_store
from mpi_ckpt.storage.run_file import RUN_FILE, same_run
from mpi_ckpt.tools.nodes import add_local


def add_remote(parser: argparse.ArgumentParser) -> None:
    """The required option --remote."""
    parser.add_argument("--remote", metavar="URL", type=_url, required=True, help=_HELP)


def add_place(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR or, in its place, --local or --remote."""
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument(
        "run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="a run's directory, or that of its checkpoints"
    )
    add_local(either)
    either.add_argument("--remote", metavar="URL", type=_url, help=_HELP)


def opened(url: str) -> ObjectStore:
    """**Local.** The store, if it can be used. Raises RemoteFailed, RemoteRefused."""
    store = open_store(url)
    store.check()
    return store


def check_same_run(store: ObjectStore, run_dir: Path) -> None:
    """**Local.** Raise UnusableOption where the store holds another run of the trainer than `run_dir`, or the
    directory above it, does."""
    for path in (run_dir / RUN_FILE, run_dir.absolute().parent / RUN_FILE):
        if path.is_file() and (there := store.get(RUN_FILE)) is not None and not same_run(path.read_bytes(), there[0]):
            raise UnusableOption(
                "the remote tier is another run's",
                path=f"{store.url}/{RUN_FILE}",
                found="other settings or data",
                expected=f"those of {path}",
                action="Name the --remote of this run, or the directory of that one.",
            )


def _url(text: str) -> str:
    try:
        check_url(text)
    except RemoteRefused as error:
        raise argparse.ArgumentTypeError(f"found {error.found}, expected {error.expected}") from None
    return text


_HELP = "the remote tier: s3://bucket/prefix (credentials and endpoint from AWS_...) or file:///directory"
