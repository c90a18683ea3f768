"""What the MPI library allows threads to do."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def threads_may_communicate() -> bool:
    """**Local.** Whether a thread may call MPI while another does (MPI_THREAD_MULTIPLE)."""
    from mpi4py import MPI  # only here: importing it starts MPI

    granted = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    if not granted:
        logger.warning("this MPI does not grant MPI_THREAD_MULTIPLE: an asynchronous save commits at the next call")
    return granted
