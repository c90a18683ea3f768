"""A program that is told what to do by a JSON document, and says what happened, on every rank, by another."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpi_ckpt import CheckpointError
from mpi_ckpt.comm.abort import abort_on_uncaught_exceptions


def main(run: Callable[[Any, dict[str, Any], list[dict[str, Any]]], dict[str, Any]]) -> None:
    """**Collective.** `run(comm, task, events)` returns what happened, and puts its events into the list."""
    abort_on_uncaught_exceptions(MPI.COMM_WORLD)
    logging.basicConfig(level=logging.WARNING)
    comm, task, events, error, done = MPI.COMM_WORLD, json.loads(sys.argv[1]), [], None, {}
    try:
        done = run(comm, task, events)
    except CheckpointError as failure:
        error = f"{type(failure).__name__}: {failure}"
    everyone = comm.gather({**done, "events": events, "error": error})
    if comm.rank == 0:
        print(json.dumps(everyone))
