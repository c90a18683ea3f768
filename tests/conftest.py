"""What all tests share: whole programs under mpirun with a hard timeout, and the environment that both MPIs want."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.batches import pytest_configure  # noqa: F401 - a hook
from tests.launch import Launcher
from tests.s3 import remote, s3, s3_server  # noqa: F401 - fixtures

# Root in a container and more ranks than cores are ordinary here; the launchers inherit this.
os.environ.update(
    OMPI_ALLOW_RUN_AS_ROOT="1",
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
    OMPI_MCA_rmaps_base_oversubscribe="1",
    OPENBLAS_NUM_THREADS="1",
)
# A session in the background of a script begins deaf to SIGINT; so would its launches.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def launch(tmp_path):
    """Starts programs on MPI ranks in `tmp_path`; nothing that a test has started outlives it."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end_all()


@pytest.fixture
def shared_path(comm):
    """A new directory that all ranks of an in-process MPI test see, gone after it.

    Not mpi_tmp_path: the plugin lets launches of a session share one base directory, which pytest prunes under them.
    """
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="mpi_ckpt-test-") if comm.rank == 0 else None))
    yield path
    all_done, deadline = comm.Ibarrier(), time.monotonic() + 10
    while not all_done.Test() and time.monotonic() < deadline:  # bounded: a rank that failed may have left
        time.sleep(0.001)
    if comm.rank == 0:
        shutil.rmtree(path, ignore_errors=True)
