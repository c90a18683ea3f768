"""`repair`: make a step on node-local directories whole again, from what is left of it there."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mpi_ckpt.errors import NoCheckpoint
from mpi_ckpt.redundancy.descriptor import write_descriptor
from mpi_ckpt.redundancy.planner import DATA, PARITY
from mpi_ckpt.redundancy.recovery import FileKey, Recovery
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.tools import nodes, status, text
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import writing

HELP = "make the newest step on node-local directories whole again"
DESCRIPTION = """Read all that the node-local directories DIR have of their newest step (or --step), and make again
what is lost or damaged: shards, parity, descriptors, manifests. A lost node's files go to a DIR that has none of the
step yet, its replacement, else to the first one. Each shard is compared with its sha256. The writer's lock of every DIR
is held meanwhile. A restore needs no repair: it does the same by itself."""
EXAMPLE = "python -m mpi_ckpt repair /mnt/node1/ckpt /mnt/node2/ckpt /mnt/node3/ckpt"


@dataclass(frozen=True)
class Repaired:
    """What was made again, by path: shards, parity files and descriptors, and manifests."""

    step: int
    shards: tuple[str, ...]
    redundancy: tuple[str, ...]
    manifests: tuple[str, ...]


def repair(local: Sequence[Path], step: int | None = None, advance: Advance = lambda _: None) -> Repaired:
    """**Local.** Make the newest step of the nodes' directories, or `step`, whole.

    Raises NoCheckpoint, LostBeyondScheme, DirectoryInUse, CorruptShard, OSError; files that were made whole stay.
    """
    committed = nodes.committed_steps(local)
    if not committed or step not in (None, *committed):
        raise NoCheckpoint(
            "the nodes hold no committed step" if step is None else f"the nodes do not hold step {step}",
            path=", ".join(map(str, local)),
            found=f"steps {', '.join(map(str, committed))}" if committed else "no manifest",
            expected="a step with a manifest in at least one of the directories",
            action="Name the directory that was `local` on each node that can still be seen.",
        )
    manifest = committed[max(committed) if step is None else step]
    with contextlib.ExitStack() as locks:
        for node in local:
            atomic.make_dir(node)
            locks.enter_context(writing(node))
        sight = nodes.look(local, manifest)
        plan = sight.plan()
        homes = _homes(sight, plan)
        targets = {key: homes[key.group, key.member] / plan.names[key] for key in plan.targets}
        for directory in sight.directories:
            atomic.make_dir(directory)
        pieces = nodes.make_again(sight, plan, targets, advance)
        for path in targets.values():
            atomic.publish(names.tmp(path), path)
        described = _describe(sight, plan, homes, pieces)
        written = _write_manifests(sight.directories, manifest)
    shards = tuple(str(path) for key, path in targets.items() if key.kind == DATA)
    parity = tuple(str(path) for key, path in targets.items() if key.kind == PARITY)
    return Repaired(manifest.step, shards, (*parity, *described), written)


def _homes(sight: nodes.Sight, plan: Recovery) -> dict[tuple[int, int], Path]:
    """Where each member's files belong: beside what is left of them, of their domain, or on a node without any."""
    by_rank: dict[int, Path] = {}
    by_domain: dict[str, Path] = {}
    for directory, found in zip(sight.directories, sight.found, strict=True):
        for descriptor in found.descriptors:
            by_rank.setdefault(descriptor.mine.rank, directory)
            by_domain.setdefault(descriptor.mine.domain, directory)
    spare = [d for d, found in zip(sight.directories, sight.found, strict=True) if not found.descriptors]
    homes = {}
    for index, place, rank, domain in _members(sight, plan):
        if rank not in by_rank and domain not in by_domain:
            by_domain[domain] = spare.pop(0) if spare else sight.directories[0]
        homes[index, place] = by_rank.get(rank) or by_domain[domain]
    return homes


def _members(sight: nodes.Sight, plan: Recovery) -> list[tuple[int, int, int, str]]:
    """Index of the group, place in it, rank and domain of every member, the domain as it was saved."""
    saved = {m.rank: m.domain for found in sight.found for d in found.descriptors for m in d.members}
    return [
        (index, place, member.rank, saved[member.rank])
        for index, group in enumerate(plan.groups)
        for place, member in enumerate(group.members)
    ]


def _describe(
    sight: nodes.Sight, plan: Recovery, homes: dict[tuple[int, int], Path], pieces: dict[FileKey, tuple]
) -> list[str]:
    """Write the descriptors that are missing, or that speak of a parity file that was made again."""
    saved = {m.rank: m for found in sight.found for d in found.descriptors for m in d.members}
    there = {d.mine.rank: d for found in sight.found for d in found.descriptors}
    written = []
    for index, place, rank, _ in _members(sight, plan):
        key = FileKey(index, place, PARITY)
        members = tuple(saved[member.rank] for member in plan.groups[index].members)
        group = plan.groups[index].at(place, pieces.get(key, plan.parity.get(key, ())))
        wanted = type(group)(group.save_id, group.world_size, group.scheme, place, members, group.parity)
        if there.get(rank) != wanted:
            write_descriptor(homes[index, place], wanted)
            written.append(str(homes[index, place] / wanted.mine.file) + " (descriptor)")
    return written


def _write_manifests(directories: Sequence[Path], manifest: ShardManifest) -> tuple[str, ...]:
    text_of_it, written = manifest.to_json().encode(), []
    for path in map(names.manifest_path, directories):
        if not (path.exists() and path.read_bytes() == text_of_it):
            atomic.write_file(path, text_of_it)
            written.append(str(path))
    return tuple(written)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("local", metavar="DIR", type=Path, nargs="+", help="the directory `local` of each node")
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="a step (default: the newest)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Repair; the exit status."""
    with progress("repair", 0) as advance:
        done = repair(arguments.local, arguments.step, advance)
    if arguments.json:
        text.print_json(asdict(done))
        return status.WELL
    for path in (*done.shards, *done.redundancy, *done.manifests):
        print(f"made again: {path}")
    print(f"step {done.step} is whole" + ("" if done.shards or done.redundancy or done.manifests else ", as it was"))
    return status.WELL
