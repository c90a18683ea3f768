"""`mpirun -n 4 python -m mpi_ckpt.train`: flags in, exit status out."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import TYPE_CHECKING, Any

from mpi_ckpt.train.preemption import Signals

if TYPE_CHECKING:
    from mpi_ckpt.train.config import Options


def main(argv: list[str] | None = None) -> None:
    """**Collective.** Run the program and leave with a status of `mpi_ckpt.train.status`."""
    signals = Signals().install()  # before the imports, which take the better part of a second

    from mpi4py import MPI
    from threadpoolctl import threadpool_limits

    from mpi_ckpt.comm.abort import abort, abort_on_uncaught_exceptions, leave_together
    from mpi_ckpt.errors import ExplainedError, RankSilent
    from mpi_ckpt.train import status
    from mpi_ckpt.train.launch import run

    comm = MPI.COMM_WORLD
    abort_on_uncaught_exceptions(comm)
    logging.basicConfig(format=f"[rank {comm.rank}] %(levelname)s: %(message)s", stream=sys.stderr)
    try:
        explicit, steps, options = _parse(argv, speaks=comm.rank == 0)
        with threadpool_limits(options.threads, user_api="blas"):
            outcome = run(comm, explicit, steps, options, signals)
    except SystemExit as usage:
        outcome = status.USAGE if usage.code else status.FINISHED
    except ExplainedError as error:
        sys.stderr.write(f"[rank {comm.rank}] error: {error}\n")  # one write: lines of ranks must not mix
        outcome = status.of(error)
        if error.silent or isinstance(error, RankSilent):  # not all ranks will come
            abort(comm, outcome)
    signals.retire()
    leave_together(comm, outcome)


def _parse(argv: list[str] | None, *, speaks: bool) -> tuple[dict[str, Any], int | None, Options]:
    """Every rank parses the same line; one of them says what is wrong with it, or prints the help."""
    from mpi_ckpt.train import arguments

    silence = contextlib.ExitStack()
    with silence:
        if not speaks:
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return arguments.parse(argv)


if __name__ == "__main__":
    main()
