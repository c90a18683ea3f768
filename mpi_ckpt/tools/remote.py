"""What the verbs that know a remote tier share: the flag, and the store that it names."""

from __future__ import annotations

import argparse
from pathlib import Path

from mpi_ckpt.errors import RemoteRefused, UnusableOption
from mpi_ckpt.storage.object_store import ObjectStore, check_url, open_store
from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest
from mpi_ckpt.storage.run_file import RUN_FILE
from mpi_ckpt.tools import homecoming
from mpi_ckpt.tools.nodes import add_local

OTHER_RUN = "the remote tier is another run's"


def add_remote(parser: argparse.ArgumentParser) -> None:
    """The required option --remote."""
    parser.add_argument("--remote", metavar="URL", type=_url, required=True, help=_HELP)


def add_place(parser: argparse.ArgumentParser) -> None:
    """RUN_DIR, --local or --remote, or RUN_DIR and --local: see `check_place`."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="a run's directory, or that of its checkpoints"
    )
    either.add_argument("--remote", metavar="URL", type=_url, help=_HELP)
    add_local(parser)


def check_place(arguments: argparse.Namespace) -> None:
    """Raise UnusableOption where it is not one place that was named; beside --local, RUN_DIR says which run's."""
    places = {"RUN_DIR": arguments.run_dir, "--local": arguments.local, "--remote": arguments.remote}
    given = [name for name, place in places.items() if place]
    if not given or given == ["--local", "--remote"]:
        raise UnusableOption(
            "the place of the steps is not named",
            found=" and ".join(given) or "none",
            expected="RUN_DIR, --local or --remote",
            action="Name one of them; --local may stand beside RUN_DIR, and leave out the name of the run then.",
        )


def opened(url: str) -> ObjectStore:
    """**Local.** The store, if it can be used. Raises RemoteFailed, RemoteRefused."""
    store = open_store(url)
    store.check()
    return store


def run_file(store: ObjectStore) -> homecoming.RunFile | None:
    """**Local.** The trainer's `run.json` as the store has it; None where there is none that can be read."""
    found = store.get(RUN_FILE)
    return homecoming.readable(f"{store.url}/{RUN_FILE}", found and found[0])


def newest_settings(store: ObjectStore) -> list[homecoming.Settings]:
    """**Local.** See `homecoming.newest_settings`: what the newest step of the store says of its run."""
    steps = committed_remotely(store)
    return homecoming.newest_settings(store.url, steps, lambda step: read_upload_manifest(store, step))


def _url(text: str) -> str:
    try:
        check_url(text)
    except RemoteRefused as error:
        raise argparse.ArgumentTypeError(f"found {error.found}, expected {error.expected}") from None
    return text


_HELP = "the remote tier: s3://bucket/prefix (credentials and endpoint from AWS_...) or file:///directory"
