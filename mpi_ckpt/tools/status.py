"""What the exit status of a verb says: one table, for all of them."""

from __future__ import annotations

WELL = 0
NOT_WELL = 1
USAGE = 2
NOTHING_THERE = 3
INTERRUPTED = 130
BROKEN_PIPE = 141

MEANING = {
    WELL: "done, and what was asked about is well: intact, equal",
    NOT_WELL: "it is not well (damaged, different), or it could not be done: the error is on stderr",
    USAGE: "bad usage",
    NOTHING_THERE: "nothing there: no run, no committed step, or not the one that was named",
    INTERRUPTED: "interrupted by Ctrl-C",
    BROKEN_PIPE: "nobody reads the output any more",
}


def table() -> str:
    """The table as text for `--help`."""
    return "exit status:\n" + "\n".join(f"  {status:<4d} {meaning}" for status, meaning in MEANING.items())
