"""Copies of `run.json` outside the run's directory, by which the other tiers and this run are known to each other.

A tier with steps of another run is refused before anything of it is read or changed. The remote tier's copy also brings
a run back whose directory is lost. That of a node does not: runs of one name meet there by accident.
"""

from __future__ import annotations

import logging
from pathlib import Path

from mpi_ckpt.checkpoint.local_tier import LocalOptions, keep_on_nodes
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import RemoteFailed
from mpi_ckpt.storage import names
from mpi_ckpt.storage.object_store import open_store
from mpi_ckpt.storage.run_file import RUN_FILE, same_run
from mpi_ckpt.train.config import ConfigError

logger = logging.getLogger(__name__)


def find(run_dir: Path, remote: str | None) -> bytes | None:
    """**Local.** The run's own file, of its directory, else of the remote tier; None for a run that is to begin.

    Raises ConfigError where the two are of different runs; RemoteFailed where the tier does not answer and the file is
    not here: nobody can say then whether there is a run to go on with.
    """
    path = run_dir / RUN_FILE
    here = path.read_bytes() if path.exists() else None
    if remote is None:
        return here
    try:
        store = open_store(remote)
        store.check()  # soon, where it does not answer
        there = store.get(RUN_FILE)
    except RemoteFailed:
        if here is None:
            raise
        return here  # `keep` asks again
    if there is None:
        return here
    if here is None:
        logger.warning("%s is not there: taking the one of %s", path, remote)
        return there[0]
    _check_same(path, here, there[0], f"{remote}/{RUN_FILE}")
    return here


def check_nodes(council: Council, run_dir: Path, mine: bytes | None, nodes: LocalOptions) -> None:
    """**Collective.** Raise ConfigError where some node has steps of another run than `mine`, what `find` has found."""

    def look() -> tuple[str, bytes | None] | None:
        directory = Path(nodes.place(council.rank).directory)
        if not names.list_steps(directory):  # what a launch left that never saved is no run
            return None
        path = directory / RUN_FILE
        return str(path), path.read_bytes() if path.exists() else None

    def compare(copies: list[tuple[str, bytes | None] | None]) -> None:
        for there, data in filter(None, copies):
            if mine is None:
                raise _no_directory(run_dir, there)
            if data is not None:  # else, as of any step, what it says of its settings has to do
                _check_same(run_dir / RUN_FILE, mine, data, there)

    council.agree(look, compare)


def keep(council: Council, run_dir: Path, remote: str | None, nodes: LocalOptions | None) -> None:
    """**Collective.** Put the run's file into the remote tier and on every node too, in the place of an older one.

    A remote tier that does not answer is logged. Raises ConfigError where the copy there is another run's.
    """
    data = council.share(lambda: (run_dir / RUN_FILE).read_bytes())
    if remote is not None:
        council.share(lambda: _keep_remotely(run_dir / RUN_FILE, data, remote))
    if nodes is not None:
        keep_on_nodes(council, nodes, RUN_FILE, data)


def _keep_remotely(path: Path, data: bytes, remote: str) -> None:
    try:
        store = open_store(remote)
        held = store.get(RUN_FILE)
        if held is not None:
            _check_same(path, data, held[0], f"{remote}/{RUN_FILE}")
        if held is None or held[0] != data:
            store.put(RUN_FILE, data, None if held is None else held[1])
    except RemoteFailed as error:
        logger.warning("%s is not in the remote tier, without which its steps are hard to go on from: %s", path, error)


def _check_same(path: Path, mine: bytes, other: bytes, there: str) -> None:
    if not same_run(mine, other):
        raise ConfigError(
            "a tier holds another run's steps",
            path=there,
            found="other settings or data",
            expected=f"those of {path}",
            action="Give each run a --local and a --remote of its own, or name the run directory of that run.",
        )


def _no_directory(run_dir: Path, there: str) -> ConfigError:
    return ConfigError(
        "a run of this name has steps on the nodes already, and this directory is not that run's",
        path=run_dir / RUN_FILE,
        found=f"no such file, and steps beside {there}",
        expected="the file that the run's first launch wrote, or no steps",
        action=f"To go on with that run, name its directory, or, if it is lost, copy {there} into this one; for a new "
        "run, give another --local, or another name to --run-dir.",
    )
