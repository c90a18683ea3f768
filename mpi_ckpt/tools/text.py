"""Numbers and tables for people, and the arguments that several verbs share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint.arguments import parse_bytes


def size(nbytes: int) -> str:
    """Bytes with a unit: 999 B, 1.5 KiB, 23.4 MiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def parse_size(text: str) -> int:
    """Bytes from '5GB' (10^9), '5GiB' (2^30) or '5000000'. Raises argparse.ArgumentTypeError."""
    try:
        return parse_bytes("size", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def age(created: str, now: datetime | None = None) -> str:
    """How long ago `created` (ISO 8601, UTC) was: 12 s, 5 min, 3 h, 9 d; '?' where it is no date."""
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
        seconds = ((now or datetime.now(timezone.utc)) - then).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds // unit))} {name}"
    return f"{int(seconds // 86_400)} d"


def duration(seconds: float) -> str:
    """Seconds as people say them: 4 s, 12 min 30 s, 3 h 20 min, 9 d 4 h."""
    whole = max(0, round(seconds))
    for unit, name, below, lesser in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // below} {lesser}"
    return f"{whole} s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> str:
    """Columns that line up, numbers to the right; the columns named in `left` to the left."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = ["<" if name in left else ">" for name in header]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, aligned, widths, strict=True)).rstrip()
        for line in lines
    )


def print_json(document: Any) -> None:
    """Strict JSON, indented."""
    print(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False))


def positive(text: str) -> int:
    """An int of 1 or more, for argparse."""
    return _integer(text, 1)


def natural(text: str) -> int:
    """An int of 0 or more, for argparse."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text) < 10**18:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer of {least} or more")
    return int(text)


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    """The positional argument RUN_DIR."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory, or that of its checkpoints")


def add_step(parser: argparse.ArgumentParser) -> None:
    """The option --step."""
    parser.add_argument("--step", metavar="STEP", type=natural, help="a committed step (default: the newest)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option --json."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
