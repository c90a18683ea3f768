"""The node-local tier: a directory on every node's own disk, where a save is fast and dies with the node.

A step lies in as many directories as there are nodes: each has the files of its own ranks, their redundancy, and a copy
of the manifest. Any one copy commits the step. Who is a node's *leader*, the lowest of its ranks, acts for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.checkpoint.arguments import check_of_use
from mpi_ckpt.checkpoint.local_holdings import Agreed, Copy, Holdings, agreed, holdings_of, is_left
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.comm.topology import failure_domain
from mpi_ckpt.errors import DirectoryInUse, UnusableOption
from mpi_ckpt.redundancy.groups import Unprotected, form_groups, shortfall
from mpi_ckpt.redundancy.recovery import Place, Vote, speakers
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.redundancy.survey import survey
from mpi_ckpt.storage import atomic, lock, names
from mpi_ckpt.storage.lock import WriterLock
from mpi_ckpt.storage.manifest import ShardManifest, ShardRecord

logger = logging.getLogger(__name__)

DOMAIN_PLACEHOLDER = "{domain}"


@dataclass(frozen=True)
class LocalOptions:
    """`path`: the directory, of the same name on every node; "{domain}" in it stands for the failure domain.

    `local_keep`: the newest steps that stay on the nodes; `shared_every`: each so many-th save goes to the shared tier
    too.
    """

    path: str
    redundancy: str = "xor"
    local_keep: int = 2
    shared_every: int = 10
    domain: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("local_keep", self.local_keep), ("shared_every", self.shared_every)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: found {value!r}, expected an int of 1 or more")
        Scheme.parse(self.redundancy)

    @classmethod
    def of(cls, local: str | Path | None, **options: Any) -> LocalOptions | None:
        """Those of a tier at `local`, the default for what is None; None for no tier. Raises ValueError."""
        check_of_use("local", local, **options)
        given = {name: value for name, value in options.items() if value is not None}
        return None if local is None else cls(str(local), **given)

    @property
    def scheme(self) -> Scheme:
        return Scheme.parse(self.redundancy)

    def place(self, rank: int) -> Place:
        """**Local.** The failure domain of `rank`, and the directory there. Raises UnusableOption for a wrong name."""
        domain = failure_domain(rank, self.domain)
        if DOMAIN_PLACEHOLDER in self.path and ("/" in domain or domain in (".", "..")):
            raise UnusableOption(
                "the name of the failure domain cannot stand in a path",
                path=self.path,
                found=repr(domain),
                expected="a plain name",
                action="Give another name: `domain`, or MPI_CKPT_DOMAIN.",
            )
        return Place(domain, self.path.replace(DOMAIN_PLACEHOLDER, domain))


class Census(NamedTuple):
    """Who leads its node; the failure domains; by which scheme they protect each other, as well as they can.

    `tolerance`: how many of them may be lost at once, fewer than the scheme says where members of a group have to share
    one. Where they can protect each other from nothing, the scheme is `single`.
    """

    leaders: frozenset[int]
    domains: tuple[str, ...]
    scheme: Scheme
    tolerance: int


class LocalTier:
    """This launch's node-local tier: where this rank's files go, and whether it leads its node.

    `wanted` is the scheme that was asked for, `scheme` the one that is used; see Census.
    """

    def __init__(self, council: Council, options: LocalOptions, launch_id: str) -> None:
        """**Collective.** Make the nodes' directories, take a writer's lock in each, and end what a crash left there.

        Raises DirectoryInUse; UnusableOption for a directory that is not one failure domain's alone.
        """
        self.wanted, self.keep, self.shared_every = options.scheme, options.local_keep, options.shared_every
        self.launch_id = launch_id
        self._lock: WriterLock | None = None
        place = council.everywhere(lambda: options.place(council.rank))
        self.domain, self.root = place.domain, Path(place.directory)
        census = council.agree(lambda: place, lambda places: _census(self.wanted, places))
        self.domains, self.scheme, self.tolerance = census.domains, census.scheme, census.tolerance
        self.leads = council.rank in census.leaders
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
                if lock.read_owner(self.root).get("launch") != self.launch_id:
                    raise
                raise UnusableOption(
                    "`local` is the same directory for several failure domains, or the directory of the shared tier",
                    path=self.root,
                    found="a lock of this very launch",
                    expected="a directory that is this failure domain's alone",
                    action=f"Name another one; where one machine plays several nodes, put {DOMAIN_PLACEHOLDER} into "
                    "`local`.",
                ) from error

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
        return holdings_of(self.root)

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
                atomic.make_dir(directory)  # a node whose ranks have no file of the step, of fewer ranks
                atomic.write_file(path, data)

        council.everywhere(write)

    def read_manifest(self, council: Council, step: int, holder: int) -> ShardManifest:
        """**Collective.** The step's manifest as rank `holder` has it."""
        path = names.manifest_path(self.directory(step))
        text = council.agree(lambda: path.read_text() if council.rank == holder else "", lambda found: found[holder])
        return ShardManifest.from_json(text, path)

    def _holder_of_what_is_left(self, council: Council, step: int, saves: list[tuple[Copy, int]]) -> int | None:
        """**Collective.** A rank that has the manifest of the step's latest save; of several, of those alone that the
        nodes can give back, or None: a node that was away may bring one of which the others have nothing."""
        if len(saves) == 1:
            return saves[0][1]
        for copy, holder in saves:
            records = self.read_manifest(council, step, holder).shards
            if council.agree(partial(self._vote, step, copy, records), partial(is_left, copy.save_id, records)):
                return holder
        return None

    def _vote(self, step: int, copy: Copy, records: Sequence[ShardRecord]) -> Vote:
        # Every byte is read: files of the saves have the same names, and often the same sizes.
        mine = range(len(records)) if self.leads else ()
        found = survey(self.directory(step), copy.save_id, records, verify=mine)
        return Vote(Place(self.domain, str(self.root)), found)

    def _settle(self, council: Council) -> None:
        """**Collective.** Finish on all nodes what is committed on one, and clean what is committed on none.

        In this order: only by the latest manifest can a node tell its files from those that an overwrite has replaced.
        """
        found = self.agree(council)
        for step in found.unequal:
            holder = self._holder_of_what_is_left(council, step, found.saves[step])
            if holder is not None:
                self.spread_manifest(council, step, holder, Path.is_dir)

        def clean() -> None:
            if self.leads:
                steps.clean(self.root, found.latest.keys())
                steps.clean_committed(self.root)

        council.everywhere(clean)


def steps_on_nodes(council: Council, options: LocalOptions) -> list[int]:
    """**Collective.** The steps that some node has a manifest of, ascending: a look that makes and locks nothing."""
    return council.agree(
        lambda: names.list_steps(Path(options.place(council.rank).directory)),
        lambda found: sorted({s for one in found for s in one}),
    )


def keep_on_nodes(council: Council, options: LocalOptions, name: str, data: bytes) -> None:
    """**Collective.** Write a file of the application's own beside the steps, on every node."""
    place = options.place(council.rank)
    leaders = council.agree(lambda: place, speakers)
    path = Path(place.directory) / name

    def write() -> None:
        if council.rank in leaders and not (path.exists() and path.read_bytes() == data):
            atomic.write_file(path, data)

    council.everywhere(write)


def _census(wanted: Scheme, places: list[Place]) -> Census:
    """Rank 0: who and how many there are. Who is protected less than was asked for hears of it before a save.

    A run that lost nodes goes on with those that are left, even if there is only one.
    """
    domains = [place.domain for place in places]
    leaders, present = speakers(places), tuple(sorted(set(domains)))
    try:
        grouping = form_groups(wanted, domains)
    except Unprotected as error:
        logger.warning("going on UNPROTECTED: a lost node takes along what is saved on the nodes alone. %s", error)
        return Census(leaders, present, Scheme.parse("single"), 0)
    if (said := shortfall(wanted, grouping)) is not None:
        logger.warning("%s on %d failure domains: %s. More nodes, or fewer ranks a node.", wanted, len(present), said)
    return Census(leaders, present, wanted, grouping.tolerance)
