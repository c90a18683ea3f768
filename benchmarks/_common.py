"""What every benchmark here shares: launching ranks, medians, the table, the machine, the JSON file.

A benchmark is started by plain `python benchmarks/NAME.py`. It launches `mpirun` on itself with `--worker`; the ranks
do the work, and rank 0 leaves its measurements as JSON in the file given with `--result`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# One thread a rank, for every library that a rank may load; more ranks than cores, and root in a container, are normal.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
}


def require(*modules: str) -> None:
    """End the program with the command that helps, unless these modules of the extra `bench` are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        sys.exit(f"This benchmark needs {', '.join(missing)}: run `pip install '.[bench]'` and start it again.")


def find_mpirun() -> str:
    """The launcher beside this Python, as it belongs to the MPI library that mpi4py loads; else the one on PATH."""
    beside = os.path.dirname(sys.executable)
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=beside) or shutil.which(name)
        if found:
            return found
    sys.exit("No mpirun was found: run `pip install '.[mpich]'`, or put the site's own MPI on PATH.")


def run_ranks(ranks: int, script: str, *arguments: str, timeout: float) -> Any:
    """Run `script --worker ARGUMENTS --result FILE` on `ranks` MPI ranks; returns what rank 0 wrote to FILE as JSON.

    Ends the program with a message when the ranks fail, or are not done in `timeout` seconds; none is left running.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` ends the ranks too
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        # mpi4py's own runner aborts all ranks when one raises; without it the others would wait for ever
        command = [find_mpirun(), "-n", str(ranks), sys.executable, "-m", "mpi4py", script, "--worker", *arguments]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        job = subprocess.Popen(
            [*command, "--result", str(result)],
            env={**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": path},
            stdout=sys.stderr,  # standard output belongs to the table
            start_new_session=True,
        )
        try:
            status = job.wait(timeout)
        except subprocess.TimeoutExpired:
            sys.exit(f"The ranks were not done after {timeout:.0f} s and were ended: {' '.join(command)}")
        finally:
            _end(job)
        if status != 0 or not result.exists():
            sys.exit(f"The ranks failed with status {status}: {' '.join(command)}")
        return json.loads(result.read_text())


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its ranks, and then whatever is left of its process group."""
    if job.poll() is None:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def meet(comm: Any) -> None:
    """**Collective.** A barrier that sleeps: a rank that only waits must not take the core of one that works."""
    done = comm.Ibarrier()
    while not done.Test():
        time.sleep(5e-4)


def spread(values: Sequence[float]) -> str:
    """The range of a measurement beside its median: `lowest - highest`."""
    return f"{min(values):.2f} - {max(values):.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain text table: the first column to the left, the others to the right."""
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def machine(**versions: str) -> dict[str, str]:
    """What a figure depends on: processor, cores, memory, system, Python, and the `versions` that the ranks report."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    """The model name from /proc/cpuinfo; not every processor type has one there."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(*modules: str) -> dict[str, str]:
    """On a rank: the versions of the MPI library, mpi4py, NumPy and these distributions."""
    from mpi4py import MPI

    mpi = " ".join(MPI.Get_library_version().splitlines()[0].split())
    return {"mpi": mpi, **{name: version(name) for name in ("mpi4py", "numpy", *modules)}}


def write_json(path: str | None, figures: dict[str, float], **details: Any) -> None:
    """Write `{"figures": {...}, ...}` to `path`, if there is one."""
    if path is not None:
        Path(path).write_text(json.dumps({"figures": figures, **details}, indent=2) + "\n")


__all__ = [
    "find_mpirun",
    "machine",
    "median",
    "meet",
    "require",
    "run_ranks",
    "spread",
    "table",
    "versions",
    "write_json",
]
