"""`python -m mpi_ckpt VERB ...`: flags, help and exit statuses. No MPI; the work is done in `tools`, a file a verb."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.tools.locate import checkpoints_root
from mpi_ckpt.tools.verify import verify


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0 success, 1 what was asked about is not well, 2 bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mpi_ckpt", description="Look after the checkpoints of a run.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    verb = verbs.add_parser("verify", help="read every committed step and compare it with its manifest")
    verb.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory, or that of its checkpoints")
    verb.add_argument("--quick", action="store_true", help="compare crc32c instead of sha256")
    verb.set_defaults(run=_verify)
    return parser


def _verify(arguments: argparse.Namespace) -> int:
    damaged = 0
    for verdict in verify(checkpoints_root(arguments.run_dir), quick=arguments.quick):
        state = "intact" if verdict.intact else "DAMAGED"
        print(f"step {verdict.step:8d}  {verdict.nbytes:14d} bytes  {state}")
        for fault in verdict.faults:
            print(f"  {fault}")
        damaged += not verdict.intact
    return 1 if damaged else 0
