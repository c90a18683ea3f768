"""`python -m mpi_ckpt VERB ...`: the table of verbs, help, errors and exit statuses. No MPI.

A verb is a module of `tools` with HELP, DESCRIPTION, EXAMPLE, `add_arguments(parser)` and `run(arguments) -> status`.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from types import ModuleType

from mpi_ckpt.errors import CheckpointError, NoCheckpoint, UnusableOption, from_os_error
from mpi_ckpt.tools import (
    diff,
    export,
    import_model,
    ls,
    pin,
    plan,
    prune,
    pull,
    push,
    repair,
    report,
    reshard,
    scavenge,
    show,
    status,
    unpin,
    verify,
    view,
    watch,
)

VERBS: dict[str, ModuleType] = {
    "ls": ls,
    "show": show,
    "verify": verify,
    "diff": diff,
    "reshard": reshard,
    "prune": prune,
    "pin": pin,
    "unpin": unpin,
    "push": push,
    "pull": pull,
    "view": view,
    "export": export,
    "import": import_model,
    "report": report,
    "watch": watch,
    "plan": plan,
    "repair": repair,
    "scavenge": scavenge,
}


def main(argv: list[str] | None = None) -> int:
    """Run one verb; returns the exit status, see `tools.status`."""
    try:
        arguments = _parser().parse_args(argv)
        found = arguments.run(arguments)
        sys.stdout.flush()  # here, where a reader who has gone can be noticed
        return found
    except NoCheckpoint as error:
        return _fail(error, status.NOTHING_THERE)
    except UnusableOption as error:
        return _fail(error, status.USAGE)
    except CheckpointError as error:
        return _fail(error, status.NOT_WELL)
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status.BROKEN_PIPE
    except OSError as error:
        return _fail(from_os_error(error, CheckpointError), status.NOT_WELL)
    except KeyboardInterrupt:
        return _fail("interrupted", status.INTERRUPTED)


def _fail(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


class _Help(argparse.HelpFormatter):
    """Paragraphs filled to the terminal's width; those with indented lines, tables and examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(p if "\n  " in f"\n{p}" else textwrap.fill(p, width) for p in paragraphs)


def _parser() -> argparse.ArgumentParser:
    epilog = f"`python -m mpi_ckpt VERB --help` explains a verb.\n\n{status.table()}"
    parser = argparse.ArgumentParser(
        prog="python -m mpi_ckpt",
        description="Look after the checkpoints of a run. No verb needs MPI.",
        epilog=epilog,
        formatter_class=_Help,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name, module in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            epilog=f"example:\n  {module.EXAMPLE}\n\n{status.table()}",
            formatter_class=_Help,
        )
        module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser
