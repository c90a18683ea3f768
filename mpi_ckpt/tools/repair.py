"""`repair`: make a step on node-local directories whole again, from what is left of it there."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpi_ckpt.redundancy.coverage import LostBeyondScheme
from mpi_ckpt.redundancy.descriptor import Descriptor, ParityPiece, descriptor_name, write_descriptor
from mpi_ckpt.redundancy.groups import surviving_losses
from mpi_ckpt.redundancy.planner import DATA, PARITY
from mpi_ckpt.redundancy.recovery import FileKey, Recovery
from mpi_ckpt.storage import atomic, names
from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.tools import nodes, status, text
from mpi_ckpt.tools.locate import nodes_of
from mpi_ckpt.tools.progress import Advance, progress
from mpi_ckpt.tools.writing import writing

HELP = "make the newest step on node-local directories whole again"
DESCRIPTION = """Read all that the node-local directories DIR have of their newest step (or --step), and make again
what is lost or damaged: shards, parity, descriptors, manifests. Name a DIR for each node: a lost node's files go to one
that has none of the step yet, its replacement, else to the first one; what an earlier repair has had to put there is
copied to a DIR of its own. Each shard is compared with its sha256. The writer's lock of every DIR is held meanwhile. A
restore needs no repair: it does the same by itself."""
EXAMPLE = "python -m mpi_ckpt repair /mnt/node*/ckpt/demo"


@dataclass(frozen=True)
class Repaired:
    """What was made again, by path: shards, parity files and descriptors, and manifests; `copied` from another node's.

    `weak`: what another loss would do that it would not have done to the step as it was saved, if anything, in words.
    """

    step: int
    shards: tuple[str, ...]
    redundancy: tuple[str, ...]
    manifests: tuple[str, ...]
    copied: tuple[str, ...]
    weak: tuple[str, ...]


def repair(local: Sequence[Path], step: int | None = None, advance: Advance = lambda _: None) -> Repaired:
    """**Local.** Make the newest step of the nodes' directories, or `step`, whole.

    Raises NoCheckpoint, LostBeyondScheme, DirectoryInUse, CorruptShard, OSError; files that were made whole stay.
    """
    committed = nodes.committed_steps(local)
    if not committed or step not in (None, *committed):
        raise nodes.no_step(local, step, committed)
    with contextlib.ExitStack() as locks:
        for node in local:
            atomic.make_dir(node)
            locks.enter_context(writing(node))
        saves = committed[max(committed) if step is None else step]
        sight, plan = _best(local, saves)
        _check_latest(sight, saves[0])
        homes = _homes(sight, _as_saved(sight, plan.recovery))
        plan = sight.plan(homes)
        recovery, groups = plan.recovery, _as_saved(sight, plan.recovery)
        targets = {key: homes[rank] / recovery.names[key] for key, rank in recovery.targets.items()}
        for directory in sight.directories:
            atomic.make_dir(directory)
        pieces = nodes.make_again(plan, {key: names.tmp(path) for key, path in targets.items()}, advance)
        for path in targets.values():
            atomic.publish(names.tmp(path), path)
        described = _describe(
            sight, [_with_parity(group, i, recovery, pieces) for i, group in enumerate(groups)], homes
        )
        written = _write_manifests(sight.directories, sight.manifest)
    again = {key: str(path) for key, path in targets.items() if recovery.names[key] not in recovery.report.moved}
    return Repaired(
        sight.manifest.step,
        shards=tuple(path for key, path in again.items() if key.kind == DATA),
        redundancy=(*(path for key, path in again.items() if key.kind == PARITY), *described),
        manifests=written,
        copied=tuple(str(path) for key, path in targets.items() if key not in again),
        weak=(*_bare(recovery), *(said for group in groups if (said := _weakness(group, homes)) is not None)),
    )


def _best(local: Sequence[Path], saves: Sequence[ShardManifest]) -> tuple[nodes.Sight, nodes.Plan]:
    try:
        return nodes.best(local, saves)
    except LostBeyondScheme as error:
        error.action = (
            "Name the directories of the other nodes, too, if there are any; else go on from the shared or the remote "
            "tier, or from an older step."
        )
        raise


def _check_latest(sight: nodes.Sight, latest: ShardManifest) -> None:
    """What is left of a later save may be all that there is of it, once more nodes are back: never write over it."""
    if sight.manifest.save_id != latest.save_id:
        manifests = [path for path in map(names.manifest_path, sight.directories) if path.exists()]
        there = [path.parent for path in manifests if latest.save_id in path.read_text(errors="replace")]
        raise LostBeyondScheme(
            f"too little is left of the latest save of step {latest.step}, though an earlier one can be had",
            path=there[0] if there else sight.directories[0],
            found=f"some of save {latest.save_id}, and save {sight.manifest.save_id}",
            expected="directories that together give back the latest save",
            action="Name those of all nodes; or leave out those that hold the later save, to repair the earlier one.",
        )


def _as_saved(sight: nodes.Sight, plan: Recovery) -> list[Descriptor]:
    """The plan's groups, with the failure domains that the members were saved in."""
    saved = {m.rank: m for found in sight.found for d in found.descriptors for m in d.members}
    return [replace(group, members=tuple(saved[rank] for rank in group.ranks)) for group in plan.groups]


def _homes(sight: nodes.Sight, groups: Sequence[Descriptor]) -> list[Path]:
    """By rank, where its files belong: with those of its failure domain, in a directory that no other domain has.

    Domains whose files lie in one directory choose first, and of several there the one whose name is in its path. Those
    that found none, or have no file left, take what is free: the replacement of a lost node. Where nothing is, files
    stay where they are, or go to the first directory.
    """
    domains = {member.rank: member.domain for group in groups for member in group.members}
    lying: dict[str, Counter[Path]] = {}  # by domain, how many of its ranks have files in a directory
    for rank, places in enumerate(_places(sight)):
        lying.setdefault(domains.setdefault(rank, f"of rank {rank} alone"), Counter()).update(places)
    free, home = list(sight.directories), {}

    def settle(domain: str, wanted: Sequence[Path]) -> None:
        if domain not in home and (there := [place for place in wanted if place in free]):
            home[domain] = next((place for place in there if domain in place.parts), there[0])
            free.remove(home[domain])

    def choice(domain: str) -> tuple[int, bool]:
        return len(lying[domain]), not any(domain in place.parts for place in lying[domain])

    for domain in sorted(lying, key=choice):
        settle(domain, [place for place, _ in lying[domain].most_common()])
    for domain in lying:
        settle(domain, free)
        home.setdefault(domain, next(iter(lying[domain]), sight.directories[0]))
    return [home[domains[rank]] for rank in range(sight.manifest.world_size)]


def _places(sight: nodes.Sight) -> list[list[Path]]:
    """By rank, the directories that have its descriptor, else the one that has its shard."""
    found: list[list[Path]] = [[] for _ in sight.manifest.shards]
    for directory, here in zip(sight.directories, sight.found, strict=True):
        for descriptor in here.descriptors:
            found[descriptor.mine.rank].append(directory)
    for record in sight.manifest.shards:
        if not found[record.rank] and record.path in sight.shards:
            found[record.rank].append(sight.shards[record.path].parent)
    return found


def _with_parity(
    group: Descriptor, index: int, plan: Recovery, pieces: dict[FileKey, tuple[ParityPiece, ...]]
) -> list[Descriptor]:
    """Each member's descriptor, with the parity that lies there or was made again."""
    known = plan.parity | pieces
    return [group.at(i, known.get(FileKey(index, i, PARITY), ())) for i in range(len(group.members))]


def _describe(sight: nodes.Sight, wanted: Sequence[Sequence[Descriptor]], homes: Sequence[Path]) -> list[str]:
    """Write the descriptors that are missing, or that speak of another group or parity file."""
    there = dict(zip(sight.directories, sight.found, strict=True))
    written = []
    for descriptor in (each for group in wanted for each in group):
        directory = homes[descriptor.mine.rank]
        if descriptor not in there[directory].descriptors:
            write_descriptor(directory, descriptor)
            written.append(str(directory / descriptor_name(descriptor.mine.file)))
    return written


def _weakness(group: Descriptor, homes: Sequence[Path]) -> str | None:
    """What the group now survives less than as it was saved, by the directories that its files lie in."""
    survived = surviving_losses(group.scheme, [str(homes[rank]) for rank in group.ranks])
    if survived >= group.tolerance:
        return None
    directory, most = Counter(homes[rank] for rank in group.ranks).most_common(1)[0]
    ranks = [rank for rank in group.ranks if homes[rank] == directory]
    return (
        f"of ranks {_list(group.ranks)}, protected by {group.scheme}, {most} ({_list(ranks)}) now lie in {directory}: "
        f"its loss{f' and that of {survived} more' * bool(survived)} would be more than can be given back. Name a "
        "directory for each node, an empty one will do; a launch on as many nodes does the same by itself"
    )


def _bare(plan: Recovery) -> list[str]:
    if not plan.report.bare:
        return []
    return [f"ranks {_list(plan.report.bare)} have lost their redundancy, and a restore protects them anew"]


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _write_manifests(directories: Sequence[Path], manifest: ShardManifest) -> tuple[str, ...]:
    text_of_it, written = manifest.to_json().encode(), []
    for path in map(names.manifest_path, directories):
        if not (path.exists() and path.read_bytes() == text_of_it):
            atomic.write_file(path, text_of_it)
            written.append(str(path))
    return tuple(written)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("local", metavar="DIR", type=Path, nargs="+", help=nodes.DIRECTORIES)
    parser.add_argument("--step", metavar="STEP", type=text.natural, help="a step (default: the newest)")
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Repair; the exit status."""
    with progress("repair", None) as advance:
        done = repair(nodes_of(arguments.local), arguments.step, advance)
    if arguments.json:
        text.print_json(asdict(done))
        return status.WELL
    for path in (*done.shards, *done.redundancy, *done.manifests):
        print(f"made again: {path}")
    for path in done.copied:
        print(f"copied to its own place: {path}")
    for weakness in done.weak:
        print(f"weaker than it was: {weakness}")
    print(
        f"step {done.step} is whole"
        + ("" if any((done.shards, done.redundancy, done.manifests, done.copied)) else ", as it was")
    )
    return status.WELL
