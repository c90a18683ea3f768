"""A note in the shared directory of the newest step that the nodes have: when none of it is seen, it was lost.

Nodes that are all gone, or looked for under another name, cannot tell by themselves that they ever held anything. The
note decides nothing about what exists: it makes a launch say what it goes back from, and refuse to begin anew unsaid.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import MissingShard
from mpi_ckpt.storage import atomic

logger = logging.getLogger(__name__)

NOTE = "nodes.json"
_FEW = 8  # names of domains that are listed


class Note(NamedTuple):
    """The newest step on the nodes, and the failure domains that it was saved in."""

    step: int
    domains: tuple[str, ...]


def read(root: Path) -> Note | None:
    """**Local.** The note, if there is one that can be read."""
    try:
        found = json.loads((root / NOTE).read_bytes())
        return Note(int(found["step"]), tuple(map(str, found["domains"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(root: Path, note: Note | None) -> None:
    """**Local.** Note it, or that there is none. What fails is logged: no save depends on it."""
    try:
        if note is None:
            atomic.remove(root / NOTE, missing_ok=True)
        elif note != read(root):
            atomic.write_file(root / NOTE, json.dumps(note._asdict()) + "\n")
    except OSError as error:
        logger.warning("cannot note what the nodes hold, going on: %s", error)


def tell_of_unseen(
    council: Council,
    root: Path,
    seen: Collection[int],
    found: int | None,
    domains: Collection[str],
    on_event: Callable[[Event], None],
) -> None:
    """**Collective.** Say so when a restore goes back because no node shows the step that the nodes had last.

    `seen` are the steps that this launch's nodes have, in the failure domains `domains`, and `found` the step that was
    restored. Raises MissingShard where that is None: the run would begin anew, and nobody has asked for it.
    """
    note = council.share(lambda: read(root))
    if note is None or note.step in seen or (found is not None and found >= note.step):
        return
    error = MissingShard(
        f"step {note.step} was saved on the nodes, and no node of this launch has anything of it",
        path=root / NOTE,
        found=f"failure domains {_few(domains)}" if domains else "no `local`",
        expected=f"failure domains {_few(note.domains)}, or a newer step in another tier",
        action="See whether `local` and the names of the domains (MPI_CKPT_DOMAIN) are those of the launch before, and "
        "bring the nodes back. If they are lost for good, begin anew, on purpose: delete this file.",
    )
    if found is None:
        raise error
    if council.rank == 0:
        logger.warning("going on from step %d: %s", found, error)
    on_event({"event": "local_loss", "step": note.step, "error": str(error), "fetched": {}})


def _few(domains: Collection[str]) -> str:
    listed = sorted(domains)
    return ", ".join(listed[:_FEW]) + f" and {len(listed) - _FEW} more" * (len(listed) > _FEW)
