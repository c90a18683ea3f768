"""`prune`: delete steps by hand, by the rules that the engine follows by itself."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from mpi_ckpt.checkpoint import retention, steps
from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.errors import CheckpointError
from mpi_ckpt.storage import names
from mpi_ckpt.tools import status, text
from mpi_ckpt.tools.locate import are_of_node, checkpoints_root, size_of_files
from mpi_ckpt.tools.progress import progress
from mpi_ckpt.tools.verdict import Verdict
from mpi_ckpt.tools.verify import verify
from mpi_ckpt.tools.writing import writing

HELP = "delete all but the newest steps"
DESCRIPTION = """Delete committed steps until the newest K are left. Pinned steps stay and do not count, nor does a
step that --keep-every divides. Before anything is deleted, every step that will be left is read and its crc32c
compared: a damaged one does not count toward K, is left as it is, and makes the exit status 1. The writer's lock is
held meanwhile: beside a running job, prune refuses. Uncommitted leftovers are none of its business: the next writer
removes them."""
EXAMPLE = "python -m mpi_ckpt prune runs/demo --keep 3 --dry-run"


@dataclass
class Plan:
    """Which steps are to go, and the damaged ones that were met among those to be left."""

    doomed: list[int]
    damaged: list[Verdict] = field(default_factory=list)


def plan(root: Path, policy: retention.Policy, *, check: bool = True) -> Plan:
    """**Local.** What `policy` deletes below `root`; with `check`, damaged steps do not count as kept.

    Reads every rotating step that will be left, once, and none when nothing is to go.
    """
    committed = names.list_steps(root)
    pinned = frozenset(step for step in committed if steps.is_pinned(names.step_dir(root, step)))
    seen: set[int] = set()
    found = Plan([])
    while True:
        damaged = {verdict.step for verdict in found.damaged}
        found.doomed = retention.choose([s for s in committed if s not in damaged], policy, held=pinned)
        every = policy.keep_every
        lasting = {s for s in committed if s in pinned or (every and s % every == 0)}
        unseen = [s for s in committed if s not in seen | lasting | {*found.doomed}]
        if not check or not found.doomed or not unseen:
            return found
        with progress("verify", sum(size_of_files(names.step_dir(root, step)) for step in unseen)) as advance:
            verdicts = list(verify(root, quick=True, steps=unseen, advance=advance))
        found.damaged += [verdict for verdict in verdicts if not verdict.intact]
        seen |= {*unseen}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    parser.add_argument("--keep", metavar="K", type=text.positive, required=True, help="leave the newest K steps")
    parser.add_argument("--keep-every", metavar="M", type=text.positive, help="leave every step that M divides too")
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    parser.add_argument("--no-verify", action="store_true", help="do not read the steps that are left")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Prune; the exit status."""
    root = checkpoints_root(arguments.run_dir)
    find_committed(root, None)
    if are_of_node(root):
        raise CheckpointError(
            "prune does not delete from a node's own directory",
            path=root,
            found="redundancy between nodes: other nodes hold the rest of the same steps",
            expected="a directory that holds whole steps",
            action="The job keeps the newest on all nodes together: --local-keep, `local_keep`.",
        )
    policy = retention.Policy(keep=arguments.keep, keep_every=arguments.keep_every)
    with contextlib.nullcontext() if arguments.dry_run else writing(root):
        found = plan(root, policy, check=not arguments.no_verify)
        sizes = {step: size_of_files(names.step_dir(root, step)) for step in found.doomed}
        gone = found.doomed if arguments.dry_run else retention.prune(root, found.doomed)
    if arguments.json:
        left = [step for step in names.list_steps(root) if step not in gone]
        document = {"dry_run": arguments.dry_run, "deleted": gone, "nbytes": sum(sizes[step] for step in gone)}
        text.print_json(document | {"left": left, "damaged": [v.step for v in found.damaged]})
    else:
        _print(found, gone, sizes, "would delete" if arguments.dry_run else "deleted")
    return status.WELL if gone == found.doomed and not found.damaged else status.NOT_WELL


def _print(found: Plan, gone: list[int], sizes: dict[int, int], what: str) -> None:
    for verdict in found.damaged:
        print(f"step {verdict.step:8d}  is damaged and does not count: {verdict.faults[0]}")
    for step in found.doomed:
        print(f"step {step:8d}  {text.size(sizes[step]):>10}  {what if step in gone else 'CANNOT DELETE'}")
    print(f"{what} {len(gone)} step{'s' * (len(gone) != 1)}, {text.size(sum(sizes[step] for step in gone))}")
