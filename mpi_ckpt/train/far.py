"""A run's own file in the remote tier, so that a run whose directory was lost goes on as the run that it was."""

from __future__ import annotations

import logging
from pathlib import Path

from mpi_ckpt.errors import RemoteFailed
from mpi_ckpt.storage import atomic
from mpi_ckpt.storage.object_store import open_store

logger = logging.getLogger(__name__)


def fetch(path: Path, remote: str | None) -> None:
    """**Local.** Bring `path` back from the remote tier if it is there and not here.

    Raises RemoteFailed where the tier does not answer: without it nobody can say whether there is a run to go on with.
    """
    if remote is None or path.exists():
        return
    found = open_store(remote).get(path.name)
    if found is not None:
        logger.warning("%s was not here: taking the one of %s", path, remote)
        atomic.make_dir(path.parent)
        atomic.write_file(path, found[0])


def keep(path: Path, remote: str | None) -> None:
    """**Local.** Put `path` into the remote tier too, in the place of an older one. What fails is logged."""
    if remote is None:
        return
    data = path.read_bytes()
    try:
        store = open_store(remote)
        held = store.get(path.name)
        if held is None or held[0] != data:
            store.put(path.name, data, None if held is None else held[1])
    except RemoteFailed as error:
        logger.warning("%s is not in the remote tier, without which its steps are hard to go on from: %s", path, error)
