"""`diff`: what differs between two steps, whatever numbers of ranks saved them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.diff_arrays import diff_arrays
from mpi_ckpt.tools.diff_values import diff_values
from mpi_ckpt.tools.finding import Finding
from mpi_ckpt.tools.locate import reading, step_of
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.source import array_bytes

HELP = "compare two steps bit by bit: arrays, named parameters, values, meta"
DESCRIPTION = """Compare two committed steps and list what differs; exit 0 if nothing does, 1 if something does. A
and B are RUN_DIR (its newest step), RUN_DIR:STEP, or a step's directory; they may come from different numbers of
ranks and any decompositions. Arrays are compared bit by bit (a NaN equals itself, 0.0 is not -0.0) and verified on
the way. Step number, number of ranks, environment and dates are not compared. Reads both steps whole, in constant
memory."""
EXAMPLE = "python -m mpi_ckpt diff runs/demo:10 runs/demo:20"

_SHOWN = 8  # parameters of an array


def diff(a: Path, b: Path, *, only_arrays: bool = False, advance: Advance = lambda nbytes: None) -> list[Finding]:
    """**Local.** Every difference between the steps in the directories `a` and `b`; `only_arrays` and parameters.

    `advance` is told of the bytes of `a`'s arrays. Raises NoCheckpoint, MissingShard, CorruptShard, InvalidManifest.
    """
    steps = (a, read_manifest(a)), (b, read_manifest(b))
    found = list(diff_arrays(*steps, advance))
    return found if only_arrays else [*found, *diff_values(*steps)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="RUN_DIR, RUN_DIR:STEP, or a step's directory")
    parser.add_argument("--only-arrays", action="store_true", help="compare arrays and named parameters alone")
    parser.add_argument("--all", action="store_true", help=f"list every parameter that differs, not {_SHOWN} an array")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print the differences; the exit status."""
    a, b = step_of(arguments.a), step_of(arguments.b)
    with reading(a), reading(b), progress("diff", array_bytes(read_manifest(a).arrays)) as advance:
        found = diff(a, b, only_arrays=arguments.only_arrays, advance=advance)
    if arguments.json:
        document = {"a": str(a), "b": str(b), "equal": not found, "differences": [each.as_json() for each in found]}
        text.print_json(document)
    elif found:
        print(_as_text(found, None if arguments.all else _SHOWN))
    else:
        print(f"equal: {a} and {b}")
    return status.NOT_WELL if found else status.WELL


def _as_text(found: Sequence[Finding], limit: int | None) -> str:
    """A table of what differs in bits, `limit` named parameters of an array at most, and a line for everything else."""
    parts = []
    in_bits = [each for each in found if each.bits is not None]
    if in_bits:
        rows = [row for _, group in groupby(in_bits, key=_array_of) for row in _rows(list(group), limit)]
        header = ("kind", "name", "differs", "max abs", "max rel", "first index")
        parts.append(text.table(header, rows, left=("kind", "name", "differs", "first index")))
    others = [(each.kind, each.name, f"{each.a}  |  {each.b}") for each in found if each.bits is None]
    if others:
        parts.append(text.table(("kind", "name", "A  |  B"), others, left=("kind", "name", "A  |  B")))
    return "\n\n".join(parts)


def _array_of(each: Finding) -> str:
    return each.name.partition(":")[0]


def _rows(group: Sequence[Finding], limit: int | None) -> list[tuple[str, ...]]:
    rows = [each.as_row() for each in group]
    if limit is None or len(rows) <= limit + 2:  # the array, its parameters; a line to say that one is left out is none
        return rows
    left_out = f"... {len(rows) - limit - 1} more parameters differ (--all)"
    return [*rows[: limit + 1], ("", left_out, "", "", "", "")]
