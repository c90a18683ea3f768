"""`mpirun -n 4 python -m mpi_ckpt.train`: flags in, exit status out."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from typing import Any

from threadpoolctl import threadpool_limits

from mpi_ckpt.errors import ExplainedError, RankSilent
from mpi_ckpt.train import arguments
from mpi_ckpt.train.config import Options
from mpi_ckpt.train.loop import run


def main(argv: list[str] | None = None) -> None:
    """**Collective.** Run the program and leave: status 0, 2 for bad usage, 1 for any other failure."""
    from mpi4py import MPI

    from mpi_ckpt.comm.abort import abort, abort_on_uncaught_exceptions, leave_together

    comm = MPI.COMM_WORLD
    abort_on_uncaught_exceptions(comm)
    logging.basicConfig(format=f"[rank {comm.rank}] %(levelname)s: %(message)s", stream=sys.stderr)
    try:
        explicit, steps, options = _parse(argv, speaks=comm.rank == 0)
        with threadpool_limits(options.threads, user_api="blas"):
            run(comm, explicit, steps, options)
    except SystemExit as usage:
        leave_together(comm, 2 if usage.code else 0)
    except RankSilent as error:
        sys.stderr.write(f"[rank {comm.rank}] error: {error}\n")  # one write: lines of ranks must not mix
        abort(comm, 1)
    except ExplainedError as error:
        sys.stderr.write(f"[rank {comm.rank}] error: {error}\n")  # one write: lines of ranks must not mix
        leave_together(comm, 1)
    leave_together(comm, 0)


def _parse(argv: list[str] | None, *, speaks: bool) -> tuple[dict[str, Any], int | None, Options]:
    """Every rank parses the same line; one of them says what is wrong with it, or prints the help."""
    silence = contextlib.ExitStack()
    with silence:
        if not speaks:
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
        return arguments.parse(argv)


if __name__ == "__main__":
    main()
