"""Copies of `run.json` outside the run's directory, by which the other tiers and this run are known to each other.

A tier with steps of another run is refused before anything of it is read or changed. The remote tier's copy also brings
a run back whose directory is lost. That of a node does not: runs of one name meet there by accident.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint.local_tier import LocalOptions, keep_on_nodes
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, InvalidManifest, NoCheckpoint, RemoteFailed, RemoteRefused
from mpi_ckpt.storage import names, run_file
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.object_store import ObjectStore, open_store, put_over
from mpi_ckpt.storage.remote_steps import committed_remotely, read_upload_manifest
from mpi_ckpt.storage.run_file import RUN_FILE
from mpi_ckpt.train.config import ConfigError

logger = logging.getLogger(__name__)

_ACTION = "Give each run a --local and a --remote of its own, or name the run directory of that run."


def find(run_dir: Path, remote: str | None) -> bytes | None:
    """**Local.** The run's own file, of its directory, else of the remote tier; None for a run that is to begin.

    Raises RemoteRefused where the tier has another run's steps; RemoteFailed where it does not answer and the file is
    not here: nobody can say then whether there is a run to go on with.
    """
    path = run_dir / RUN_FILE
    here = path.read_bytes() if path.exists() else None
    if remote is None:
        return here
    try:
        store = open_store(remote)
        store.check()  # soon, where it does not answer
        there = _of_store(store, path, here)
    except RemoteRefused:
        raise
    except RemoteFailed:
        if here is None:
            raise
        return here  # `admit` asks again
    if here is None and there is not None:
        logger.warning("%s is not there: taking the one of %s", path, remote)
    return there if here is None else here


def admit(store: ObjectStore, run_dir: Path) -> None:
    """**Local.** Before anything is uploaded: refuse a place of another run's, and put this run's file there.

    Without the file its steps would be hard to go on from. Raises RemoteRefused, RemoteFailed.
    """
    path = run_dir / RUN_FILE
    try:
        mine = path.read_bytes()
    except OSError as error:
        raise RemoteFailed(f"the run's own file cannot be read: {error}", path=path) from error
    held = store.get(RUN_FILE)
    _of_store(store, path, mine)
    put_over(store, RUN_FILE, held, mine, f"that of {run_dir}")  # not over one that came since: it was not compared


def _of_store(store: ObjectStore, path: Path, mine: bytes | None) -> bytes | None:
    """The copy of the store; None where it has no step, so that the place is nobody's, or none that can be read."""
    committed = committed_remotely(store)
    if not committed:
        return None
    held = store.get(RUN_FILE)
    if held is not None and run_file.read(held[0]) is not None:
        if mine is not None:
            _check_copy(RemoteRefused, path, mine, held[0], f"{store.url}/{RUN_FILE}")
        return held[0]
    if mine is not None:
        for step in reversed(committed):
            try:
                found = read_upload_manifest(store, step)
            except InvalidManifest:
                continue
            if found is not None:
                _check_step(RemoteRefused, path, mine, found.meta, f"{store.url}/{names.step_name(step)}")
                break
    return None


def check_nodes(council: Council, run_dir: Path, mine: bytes | None, nodes: LocalOptions) -> None:
    """**Collective.** Raise ConfigError where some node has steps of another run than `mine`, what `find` has found.

    A node tells by its copy of the file, or, where that is damaged or older launches left none, by its newest step.
    """
    path = run_dir / RUN_FILE

    def look() -> tuple[str, bytes | None, dict[str, Any]] | None:
        directory = Path(nodes.place(council.rank).directory)
        steps = names.list_steps(directory)
        if not steps:  # what a launch left that never saved is no run
            return None
        copy = directory / RUN_FILE
        data = copy.read_bytes() if copy.exists() else None
        return str(copy), data if data and run_file.read(data) else None, _meta(directory, steps)

    def compare(copies: list[tuple[str, bytes | None, dict[str, Any]] | None]) -> None:
        for there, data, meta in filter(None, copies):
            if mine is None:
                raise _no_directory(run_dir, there)
            if data is not None:
                _check_copy(ConfigError, path, mine, data, there)
            else:
                _check_step(ConfigError, path, mine, meta, there)

    council.agree(look, compare)


def _meta(directory: Path, steps: list[int]) -> dict[str, Any]:
    for step in reversed(steps):
        try:
            return dict(read_manifest(names.step_dir(directory, step)).meta)
        except (NoCheckpoint, InvalidManifest):
            continue
    return {}


def _check_copy(
    kind: type[ConfigError] | type[CheckpointError], path: Path, mine: bytes, other: bytes, there: str
) -> None:
    # A file of its own that is damaged is for `plan_launch` to tell of.
    if run_file.read(mine) is not None and not run_file.same_run(mine, other):
        what, expected = "a tier holds another run's steps", f"those of {path}"
        raise kind(what, path=there, found="other settings, data or run_id", expected=expected, action=_ACTION)


def _check_step(
    kind: type[ConfigError] | type[CheckpointError], path: Path, mine: bytes, meta: dict[str, Any], there: str
) -> None:
    if other := run_file.differing(run_file.identity(meta), run_file.identity(run_file.read(mine) or {})):
        what, expected = "a tier holds another run's steps", f"{other.expected}, as in {path}"
        raise kind(what, path=there, found=other.found, expected=expected, action=_ACTION)


def keep(council: Council, run_dir: Path, nodes: LocalOptions) -> None:
    """**Collective.** Put the run's file on every node too, in the place of an older one."""
    keep_on_nodes(council, nodes, RUN_FILE, council.share(lambda: (run_dir / RUN_FILE).read_bytes()))


def _no_directory(run_dir: Path, there: str) -> ConfigError:
    return ConfigError(
        "a run of this name has steps on the nodes already, and this directory is not that run's",
        path=run_dir / RUN_FILE,
        found=f"no such file, and steps beside {there}",
        expected="the file that the run's first launch wrote, or no steps",
        action=f"To go on with that run, name its directory, or, if it is lost, copy {there} into this one; for a new "
        "run, give another --local, or another name to --run-dir.",
    )
