"""The node-local tier: a directory on every node's own disk, where a save is fast and dies with the node.

A step lies in as many directories as there are nodes: each has the files of its own ranks, their redundancy, and a copy
of the manifest. Any one copy commits the step. Who is a node's *leader*, the lowest of its ranks, acts for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.topology import failure_domain
from mpi_ckpt.errors import CheckpointError, DirectoryInUse, InvalidManifest, NoCheckpoint, UnknownSchema
from mpi_ckpt.redundancy.groups import form_groups
from mpi_ckpt.redundancy.recovery import Place, speakers
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage import atomic, lock, names
from mpi_ckpt.storage.lock import WriterLock
from mpi_ckpt.storage.manifest import read_manifest

logger = logging.getLogger(__name__)

DOMAIN_PLACEHOLDER = "{domain}"


@dataclass(frozen=True)
class Options:
    """`path`: the directory, of the same name on every node; "{domain}" in it stands for the failure domain.

    `keep`: the newest steps that stay on the nodes; `shared_every`: each so many-th save goes to the shared tier too.
    """

    path: str
    redundancy: str = "xor"
    keep: int = 2
    shared_every: int = 10
    domain: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("local_keep", self.keep), ("shared_every", self.shared_every)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: found {value!r}, expected an int of 1 or more")
        Scheme.parse(self.redundancy)

    @property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.redundancy)

    def place(self) -> Place:
        """**Local.** This rank's failure domain, and the directory there. Raises CheckpointError for a wrong name."""
        domain = failure_domain(self.domain)
        if DOMAIN_PLACEHOLDER in self.path and ("/" in domain or domain in (".", "..")):
            raise CheckpointError(
                "the name of the failure domain cannot stand in a path",
                path=self.path,
                found=repr(domain),
                expected="a plain name",
                action="Give another name: `domain`, or MPI_CKPT_DOMAIN.",
            )
        return Place(domain, self.path.replace(DOMAIN_PLACEHOLDER, domain))


class Copy(NamedTuple):
    """What a node's manifest of a step says of its save; the greatest of several is the latest save."""

    save_count: int
    created: str
    save_id: str


class Holdings(NamedTuple):
    """What a leader finds in its directory: manifests by step, and steps whose directory has none."""

    committed: dict[int, Copy]
    uncommitted: frozenset[int]


class Agreed(NamedTuple):
    """What all nodes together hold: the latest save of each step and a rank that has its manifest.

    `unequal` are the steps of which some node has another manifest, or a directory without one.
    """

    latest: dict[int, tuple[Copy, int]]
    unequal: tuple[int, ...]


class LocalTier:
    """This launch's node-local tier: where this rank's files go, and whether it leads its node."""

    def __init__(self, council: Council, options: Options, launch_id: str) -> None:
        """**Collective.** Make the nodes' directories, take a writer's lock in each, and end what a crash left there.

        Raises DirectoryInUse; CheckpointError where the failure domains cannot protect each other.
        """
        self.scheme, self.keep, self.shared_every = options.scheme, options.keep, options.shared_every
        self.launch_id = launch_id
        self._lock: WriterLock | None = None
        place = council.everywhere(options.place)
        self.domain, self.root = place.domain, Path(place.directory)
        self.leads = council.rank in council.agree(lambda: place, lambda places: _leaders(self.scheme, places))
        try:
            council.everywhere(self._take)
            self._settle(council)
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        if self.leads:
            atomic.make_dir(self.root)
            try:
                self._lock = WriterLock(self.root, self.launch_id)
            except DirectoryInUse as error:
                error.action = (
                    "End that launch. Where one machine plays several nodes, each needs a directory of its own: put "
                    f"{DOMAIN_PLACEHOLDER} into `local`."
                )
                raise

    def check_still(self) -> None:
        """**Local.** Raise DirectoryInUse when another launch has taken over this node's directory."""
        lock.check_owner(self.root, self.launch_id)

    def release(self) -> None:
        """**Local.** Let the next launch in; again does nothing."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def directory(self, step: int) -> Path:
        """The step's directory on this rank's node."""
        return names.step_dir(self.root, step)

    def look(self) -> Holdings | None:
        """**Local.** What lies here; None from a rank that does not lead. Raises UnknownSchema."""
        if not self.leads:
            return None
        committed = {}
        for step in names.list_steps(self.root):
            try:
                found = read_manifest(self.directory(step))
                committed[step] = Copy(found.save_count, found.created, found.save_id)
            except UnknownSchema:
                raise
            except NoCheckpoint:
                continue
            except InvalidManifest as error:
                logger.warning("a node's copy of a manifest is damaged and counts for nothing: %s", error)
        aside = frozenset(s for s in names.list_uncommitted(self.root) if steps.is_set_aside(self.directory(s)))
        return Holdings(committed, frozenset(names.list_uncommitted(self.root)) - aside)

    def agree(self, council: Council) -> Agreed:
        """**Collective.** What lies on all nodes."""
        return council.agree(self.look, agreed)

    def spread_manifest(self, council: Council, step: int, holder: int, wanted: Callable[[Path], bool]) -> None:
        """**Collective.** Put the manifest that rank `holder` has on every node whose directory of it is `wanted`."""
        directory = self.directory(step)
        path = names.manifest_path(directory)
        data = council.agree(lambda: path.read_bytes() if council.rank == holder else b"", lambda found: found[holder])

        def write() -> None:
            if self.leads and wanted(directory) and not (path.exists() and path.read_bytes() == data):
                self.check_still()
                atomic.write_file(path, data)

        council.everywhere(write)

    def _settle(self, council: Council) -> None:
        """**Collective.** Finish on all nodes what is committed on one, and clean what is committed on none.

        In this order: only by the latest manifest can a node tell its files from those that an overwrite has replaced.
        """
        found = self.agree(council)
        for step in found.unequal:
            self.spread_manifest(council, step, found.latest[step][1], Path.is_dir)

        def clean() -> None:
            if self.leads:
                steps.clean(self.root, found.latest.keys())
                steps.clean_committed(self.root)

        council.everywhere(clean)


def agreed(found: list[Holdings | None]) -> Agreed:
    """From every rank's look."""
    latest: dict[int, tuple[Copy, int]] = {}
    for rank, holdings in enumerate(found):
        for step, copy in holdings.committed.items() if holdings else ():
            if step not in latest or copy > latest[step][0]:
                latest[step] = copy, rank
    unequal = {
        step
        for holdings in found
        if holdings
        for step, (copy, _) in latest.items()
        if holdings.committed.get(step, None if step in holdings.uncommitted else copy) != copy
    }
    return Agreed(latest, tuple(sorted(unequal)))


def steps_on_nodes(council: Council, options: Options) -> list[int]:
    """**Collective.** The steps that some node has a manifest of, ascending: a look that makes and locks nothing."""
    return council.agree(
        lambda: names.list_steps(Path(options.place().directory)),
        lambda found: sorted({s for one in found for s in one}),
    )


def _leaders(scheme: Scheme, places: list[Place]) -> frozenset[int]:
    """Rank 0: who leads; whoever could not be protected hears of it now, not at the first save."""
    grouping = form_groups(scheme, [place.domain for place in places])
    if grouping.tolerance < scheme.tolerance:
        text = "%s: members of a group share failure domains, so that %d of these may be lost at once, not %d"
        logger.warning(text, scheme, grouping.tolerance, scheme.tolerance)
    return speakers(places)
