"""From a parsed manifest to records: every field there, of its type, within its bounds, and in keeping with the others.

Nothing of a manifest reaches a reader unchecked: numbers become offsets, paths are opened. Each fault is an
InvalidManifest that names the field. Fields that this version does not know are ignored, a newer schema is refused.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from mpi_ckpt.errors import InvalidManifest, LayoutMismatch, UnknownSchema
from mpi_ckpt.storage import names
from mpi_ckpt.storage.crc import CHUNK
from mpi_ckpt.storage.direct import ALIGN
from mpi_ckpt.storage.json_fields import (
    Fault,
    boolean,
    crc32c,
    dict_of,
    integer,
    integers,
    list_of,
    mapping,
    record,
    seconds,
    sha256,
    string,
)
from mpi_ckpt.storage.manifest_layout import check_index, check_tilings
from mpi_ckpt.storage.records import (
    FORMAT,
    ITEMSIZE,
    SCHEMA_VERSION,
    ArrayRecord,
    BlockRecord,
    IndexRecord,
    ShardRecord,
    ValuesRecord,
)


def _save_id(value: Any) -> str:
    if not names.is_save_id(string(value)):
        raise Fault(repr(value), "8 to 64 lower-case hexadecimal digits")
    return value


def _dtype(value: Any) -> str:
    if string(value) not in ITEMSIZE:
        raise Fault(repr(value), f"one of {', '.join(ITEMSIZE)}")
    return value


def _block(start: tuple[int, ...], shape: tuple[int, ...], *others: Any) -> BlockRecord:
    if len(start) != len(shape):
        raise Fault(str(list(shape)), f"as many axes as start {list(start)}", "shape")
    return BlockRecord(start, shape, *others)


_VERSION = record(lambda *both: both, {"format": string, "schema_version": integer})
_ARRAY = record(ArrayRecord, {"dtype": _dtype, "shape": integers}, replicated=boolean)
_INDEX = record(IndexRecord, {"start": integer, "shape": integers})
_VALUES = record(ValuesRecord, {"offset": integer, "nbytes": integer, "crc32c": crc32c})
_BLOCK = record(
    _block,
    {"start": integers, "shape": integers, "offset": integer, "table_offset": integer, "table_crc32c": crc32c},
)
_SHARD = record(
    ShardRecord,
    {
        "rank": integer,
        "path": string,
        "nbytes": integer,
        "sha256": sha256,
        "crc32c": crc32c,
        "blocks": dict_of(list_of(_BLOCK)),
        "values": _VALUES,
    },
    param_shard_offset=integer,
    param_shard_numel=integer,
)


def _shard(value: Any) -> ShardRecord:
    """The same as _SHARD in half the time, as there may be ten thousands; the naming of a fault is left to it."""
    try:
        found = ShardRecord(
            integer(value["rank"]),
            string(value["path"]),
            integer(value["nbytes"]),
            sha256(value["sha256"]),
            crc32c(value["crc32c"]),
            {key: tuple([_quick_block(block) for block in held]) for key, held in value["blocks"].items()},
            _VALUES(value["values"]),
        )
        if "param_shard_offset" in value and "param_shard_numel" in value:
            offset, numel = integer(value["param_shard_offset"]), integer(value["param_shard_numel"])
            found = found._replace(param_shard_offset=offset, param_shard_numel=numel)
        return found
    except (KeyError, TypeError, AttributeError, Fault):
        return _SHARD(value)


def _quick_block(value: Any) -> BlockRecord:
    start, shape = integers(value["start"]), integers(value["shape"])
    return _block(start, shape, integer(value["offset"]), integer(value["table_offset"]), crc32c(value["table_crc32c"]))


_FIELDS = {
    "step": integer,
    "save_id": _save_id,
    "world_size": integer,
    "wall_clock_seconds": seconds,
    "created": string,
    "environment": mapping,
    "meta": mapping,
    "metrics": mapping,
    "arrays": dict_of(_ARRAY),
    "index": dict_of(_INDEX),
    "shards": list_of(_shard),
}
_DOCUMENT = record(
    lambda *fields, **later: dict(zip(_FIELDS, fields, strict=True)) | later, _FIELDS, save_count=integer
)


def check_document(document: dict[str, Any], path: object = None) -> dict[str, Any]:
    """The fields of a ShardManifest, by name. Raises InvalidManifest; UnknownSchema for a newer version."""
    try:
        _check_version(document, path)
        fields = _DOCUMENT(document)
        _check_shards(fields)
    except Fault as fault:
        raise InvalidManifest(
            f"the manifest's field {fault.field} is not valid",
            path=path,
            found=fault.found,
            expected=fault.expected,
            action="Restore another step, or bring the manifest back from a copy; do not edit it.",
        ) from None
    return fields


def _check_version(document: dict[str, Any], path: object) -> None:
    kind, version = _VERSION(document)
    if kind != FORMAT:
        raise Fault(repr(kind), FORMAT, "format")
    if version < 1:
        raise Fault(version, "a number from 1 on", "schema_version")
    if version > SCHEMA_VERSION:
        raise UnknownSchema(
            "the manifest was written by a newer version of the format",
            path=path,
            found=f"schema_version {version}",
            expected=f"schema_version {SCHEMA_VERSION} or older",
            action="Read it with a newer release of mpi_ckpt.",
        )


def _check_shards(fields: dict[str, Any]) -> None:
    """Ranks, file names, places in the files and in the arrays: what only all fields together can show."""
    size, save_id, arrays = fields["world_size"], fields["save_id"], fields["arrays"]
    fields["shards"] = shards = tuple(sorted(fields["shards"], key=lambda shard: shard.rank))
    ranks = [shard.rank for shard in shards]
    if ranks != list(range(size)):
        wrong = sorted(set(range(min(size, len(ranks) + 1))) ^ set(ranks)) or ["one rank twice"]
        raise Fault(f"{len(ranks)} ranks, {wrong[0]} wrong", f"each of the ranks 0 to {size - 1} once", "shards")
    try:
        check_tilings(arrays, shards)
        check_index(arrays, fields["index"])
    except LayoutMismatch as error:
        field = "index" if "index" in error.what else "arrays"
        raise Fault(f"{error.what}: {error.found}", str(error.expected), field) from None
    for shard in shards:
        if shard.path not in (names.shard_name(shard.rank), names.shard_name(shard.rank, save_id)):
            expected = f"{names.shard_name(shard.rank)} or {names.shard_name(shard.rank, save_id)}"
            raise Fault(repr(shard.path), expected, f"shards[{shard.rank}].path")
        _check_places(shard, arrays)


def _check_places(shard: ShardRecord, arrays: dict[str, ArrayRecord]) -> None:
    """Every part of the file lies within it, blocks on multiples of 4096, and no two parts share a byte."""
    parts = [(0, 0, "")]  # begin, end, field
    if shard.values.nbytes:
        parts.append((shard.values.offset, shard.values.offset + shard.values.nbytes, "values"))
    for key, blocks in shard.blocks.items():
        itemsize = ITEMSIZE[arrays[key].dtype]
        for _, shape, offset, table, _ in blocks:
            nbytes = math.prod(shape, start=itemsize)
            if nbytes:
                if offset % ALIGN:
                    raise Fault(offset, f"a multiple of {ALIGN}", f"shards[{shard.rank}].blocks[{key!r}].offset")
                parts.append((offset, offset + nbytes, key))
                parts.append((table, table - 4 * (-nbytes // CHUNK), key))
    parts.sort()
    for (_, end, one), (begin, _, other) in pairwise(parts):
        if begin < end:
            field = f"shards[{shard.rank}] (offsets of {one} and {other})"
            raise Fault(f"one part up to byte {end}, the next from byte {begin}", "parts that share no byte", field)
    _, end, last = parts[-1]
    if end > shard.nbytes:
        field = f"shards[{shard.rank}] (offsets of {last})"
        raise Fault(f"a part up to byte {end}", f"parts within the file's {shard.nbytes} bytes", field)
