"""The record that lies beside a rank's file and says how it is protected: who the group is, and what the parity is.

    rank00002.h5  rank00002.parity  rank00002.redundancy.json

It is strict JSON in the form of the manifest, with a digest of its own. Any surviving member's tells what the whole
group held; a parity's checksums are known to its own descriptor alone, for it can be made again. They are crc32c: what
is made from parity is data, and has to match their own sha256.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mpi_ckpt.errors import CheckpointError, InvalidManifest, UnknownSchema
from mpi_ckpt.redundancy import planner
from mpi_ckpt.redundancy.groups import surviving_losses
from mpi_ckpt.redundancy.scheme import Scheme
from mpi_ckpt.storage import atomic, json_fields, manifest_json, names
from mpi_ckpt.storage.json_fields import Fault

FORMAT = "mpi_ckpt redundancy"
SCHEMA_VERSION = 1
PARITY_SUFFIX = ".parity"
DESCRIPTOR_SUFFIX = ".redundancy.json"
_ACTION = "Remove the file if the group's others are there: `repair` makes it again."


class Member(NamedTuple):
    """A rank's own file, as its shard's record has it, and the failure domain that it lies in."""

    rank: int
    domain: str
    file: str  # a plain name
    nbytes: int
    sha256: str


class ParityPiece(NamedTuple):
    """Bytes offset..offset+nbytes-1 of a parity file; what lies between pieces is zeros."""

    offset: int
    nbytes: int
    crc32c: str


@dataclass(frozen=True)
class Descriptor:
    """The group `members`, and the parity file of the one at the place `member` of it."""

    save_id: str
    world_size: int
    scheme: Scheme
    member: int
    members: tuple[Member, ...]
    parity: tuple[ParityPiece, ...]

    @property
    def mine(self) -> Member:
        """The member that this descriptor lies beside."""
        return self.members[self.member]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks."""
        return tuple(member.rank for member in self.members)

    @property
    def group(self) -> tuple[str, tuple[int, ...]]:
        """What tells the group from others of the save, those of an earlier protection included."""
        return str(self.scheme), self.ranks

    @property
    def tolerance(self) -> int:
        """How many failure domains, any of them, the group may lose: fewer than its scheme says where members share."""
        return surviving_losses(self.scheme, [member.domain for member in self.members])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each member's file."""
        return tuple(member.nbytes for member in self.members)

    @property
    def parity_nbytes(self) -> int:
        """Bytes of this member's parity file."""
        return max((piece.offset + piece.nbytes for piece in self.parity), default=0)

    def at(self, member: int, parity: tuple[ParityPiece, ...] = ()) -> Descriptor:
        """The descriptor of another member of the same group."""
        return replace(self, member=member, parity=parity)

    def to_json(self) -> str:
        """Strict JSON, a line a member."""
        document = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "save_id": self.save_id}
        document |= {"world_size": self.world_size, "scheme": str(self.scheme), "member": self.member}
        members = [manifest_json.canonical(member._asdict()) for member in self.members]
        pieces = [manifest_json.canonical(piece._asdict()) for piece in self.parity]
        return manifest_json.dump(document, {"members": members, "parity": pieces})

    @classmethod
    def from_json(cls, text: str, path: object = None) -> Descriptor:
        """The descriptor that `text` is. Raises InvalidManifest, UnknownSchema, naming `path`."""
        try:
            document = manifest_json.load(text, path)
            _check_version(document, path)
            found: Descriptor = _check(document)
            _check_parity(found)
        except Fault as fault:
            where = f" (field {fault.field})" if fault.field else ""
            raise _invalid(f"a redundancy descriptor is not valid{where}", path, fault.found, fault.expected) from None
        except UnknownSchema:
            raise
        except InvalidManifest as error:
            raise _invalid("a redundancy descriptor is not what was written", path, error, None) from error
        return found


def parity_name(file: str) -> str:
    """`rank00002.parity` for `rank00002.h5`."""
    return Path(file).stem + PARITY_SUFFIX


def descriptor_name(file: str) -> str:
    """`rank00002.redundancy.json` for `rank00002.h5`."""
    return Path(file).stem + DESCRIPTOR_SUFFIX


def write_descriptor(directory: Path, descriptor: Descriptor) -> None:
    """**Local.** Put it in place, durably. Raises OSError."""
    atomic.write_file(Path(directory) / descriptor_name(descriptor.mine.file), descriptor.to_json())


def read_descriptor(path: Path) -> Descriptor:
    """**Local.** Raises InvalidManifest, UnknownSchema; OSError from the disk."""
    found = Descriptor.from_json(Path(path).read_text(errors="replace"), path)
    if descriptor_name(found.mine.file) != Path(path).name:
        what = "a redundancy descriptor lies under another file's name"
        raise _invalid(what, path, Path(path).name, descriptor_name(found.mine.file))
    return found


# -- strict reading ----------------------------------------------------------------------------------------------------


def _check_version(document: dict[str, Any], path: object) -> None:
    if document.get("format") != FORMAT:
        raise Fault(repr(document.get("format")), repr(FORMAT), "format")
    version = json_fields.integer(document.get("schema_version"))
    if version > SCHEMA_VERSION:
        raise UnknownSchema(
            "a redundancy descriptor was written by a newer version",
            path=path,
            found=f"schema_version {version}",
            expected=f"at most {SCHEMA_VERSION}",
            action="Install a newer mpi_ckpt.",
        )


def _plain_name(value: Any) -> str:
    text = json_fields.string(value)
    if text in ("", ".", "..") or text != os.path.basename(text) or "\0" in text:
        raise Fault(repr(text), "a plain file name")
    return text


def _scheme(value: Any) -> Scheme:
    try:
        return Scheme.parse(json_fields.string(value))
    except CheckpointError as error:
        raise Fault(repr(value), str(error.expected)) from None


def _save_id(value: Any) -> str:
    text = json_fields.string(value)
    if not names.is_save_id(text):
        raise Fault(repr(text), "8 to 64 lower-case hexadecimal digits")
    return text


_check = json_fields.record(
    Descriptor,
    {
        "save_id": _save_id,
        "world_size": json_fields.integer,
        "scheme": _scheme,
        "member": json_fields.integer,
        "members": json_fields.list_of(
            json_fields.record(
                Member,
                {
                    "rank": json_fields.integer,
                    "domain": json_fields.string,
                    "file": _plain_name,
                    "nbytes": json_fields.integer,
                    "sha256": json_fields.sha256,
                },
            )
        ),
        "parity": json_fields.list_of(
            json_fields.record(
                ParityPiece,
                {
                    "offset": json_fields.integer,
                    "nbytes": json_fields.integer,
                    "crc32c": json_fields.crc32c,
                },
            )
        ),
    },
)


def _check_parity(found: Descriptor) -> None:
    """Whether the fields fit each other: the group is one, and the parity is what the scheme makes of it."""
    ranks, least = found.ranks, found.scheme.parities
    if not least < len(ranks) <= 256 or len(set(ranks)) < len(ranks) or max(ranks) >= found.world_size:
        raise Fault(list(ranks), f"more than {least} different ranks below {found.world_size}", "members")
    if found.member >= len(ranks):
        raise Fault(found.member, f"a place below {len(ranks)}", "member")
    if len({member.file for member in found.members}) < len(ranks):
        raise Fault([member.file for member in found.members], "different file names", "members")
    expected = [(p.offset, p.nbytes) for p in planner.parity_parts(found.scheme, found.sizes, found.member)]
    pieces = [(p.offset, p.nbytes) for p in found.parity]
    if pieces != expected:
        raise Fault(pieces, f"pieces (offset, nbytes) {expected}", "parity")


def _invalid(what: str, path: object, found: object, expected: object) -> InvalidManifest:
    return InvalidManifest(what, path=path, found=found, expected=expected, action=_ACTION)
