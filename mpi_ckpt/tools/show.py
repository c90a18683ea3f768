"""`show`: what a step's manifest says, for people, or as it is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpi_ckpt.checkpoint import steps
from mpi_ckpt.checkpoint.steps import find_committed
from mpi_ckpt.redundancy.descriptor import Descriptor, parity_name
from mpi_ckpt.redundancy.survey import survey
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import ShardManifest, flat_arrays, read_manifest
from mpi_ckpt.tools import nodes, status, text
from mpi_ckpt.tools.locate import checkpoints_root, save_id_of
from mpi_ckpt.tools.source import array_bytes

HELP = "show what a step consists of: meta, arrays, named parameters, shards"
DESCRIPTION = """Show the manifest of STEP (default: the newest committed one). It is checked, the shards are not
read: `verify` does that. With --json the manifest is printed as it is. In a node's own directory the manifest speaks of
the shards on all nodes, and what lies there, with its redundancy, comes last; {domain} in RUN_DIR stands for every
node's directory."""
EXAMPLE = "python -m mpi_ckpt show runs/demo 20"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the verb."""
    text.add_run_dir(parser)
    parser.add_argument(
        "step", metavar="STEP", nargs="?", type=text.natural, help="a committed step (default: the newest)"
    )
    text.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """**Local.** Print the manifest; the exit status."""
    if local := nodes.nodes_in_place_of(arguments.run_dir):
        step = nodes.find_listed(local, arguments.step)[-1]
        directories = [directory for node in local if (directory := names.step_dir(node, step)).is_dir()]
        committed = [directory for directory in directories if steps.is_committed(directory)]
        directory = next(filter(save_id_of, committed), committed[0])  # one that can be read
    else:
        directory = find_committed(checkpoints_root(arguments.run_dir), arguments.step)
        directories = []
    manifest = read_manifest(directory)
    if arguments.json:
        print(names.manifest_path(directory).read_text(encoding="utf-8"), end="")
    else:
        print("\n\n".join(describe(directory, manifest, directories)))
    return status.WELL


def describe(directory: Path, manifest: ShardManifest, on_nodes: Sequence[Path] = ()) -> list[str]:
    """**Local.** The manifest in paragraphs; parts that are empty are left out. `on_nodes`: the nodes' directories."""
    parts = [_head(directory, manifest)]
    for name, mapping in (
        ("meta", manifest.meta),
        ("metrics", manifest.metrics),
        ("environment", manifest.environment),
    ):
        if mapping:
            parts.append(f"{name}\n{_indented(mapping)}")
    if manifest.arrays:
        parts.append(f"arrays\n{_arrays(manifest)}")
    if manifest.index:
        parts.append(f"named parameters, intervals of {', '.join(flat_arrays(manifest.arrays))}\n{_index(manifest)}")
    parts.append(f"shards\n{_shards(manifest)}")
    for here in on_nodes:
        title = "on this node" if len(on_nodes) == 1 else f"in {here}"
        parts.append(f"{title}\n{_here(here, manifest)}")
    return parts


def _head(directory: Path, manifest: ShardManifest) -> str:
    nbytes = sum(shard.nbytes for shard in manifest.shards)
    facts = {
        "step": f"{manifest.step}{' (pinned)' if steps.is_pinned(directory) else ''}",
        "directory": directory,
        "created": f"{manifest.created} ({text.age(manifest.created)} ago)",
        "run time": f"{manifest.wall_clock_seconds:.1f} s since the run began",
        "ranks": manifest.world_size,
        "bytes": f"{text.size(nbytes)} ({nbytes} B)",
        "save id": manifest.save_id,
    }
    return "\n".join(f"{name:<10} {fact}" for name, fact in facts.items())


def _indented(mapping: Mapping[str, Any]) -> str:
    width = max(map(len, mapping))
    lines = (f"  {name:<{width}}  {_value(value)}" for name, value in mapping.items())
    return "\n".join(lines)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _arrays(manifest: ShardManifest) -> str:
    rows = [
        (
            f"  {key}",
            a.dtype,
            _shape(a.shape),
            text.size(array_bytes({key: a})),
            _stored(manifest, key),
        )
        for key, a in sorted(manifest.arrays.items())
    ]
    return text.table(("  key", "dtype", "shape", "bytes", "stored"), rows, left=("  key", "dtype", "shape", "stored"))


def _stored(manifest: ShardManifest, key: str) -> str:
    if manifest.arrays[key].replicated:
        return "replicated"
    blocks = sum(block.block.size > 0 for shard in manifest.shards for block in shard.blocks.get(key, ()))
    return f"{blocks} block{'s' * (blocks != 1)}"


def _index(manifest: ShardManifest) -> str:
    entries = sorted(manifest.index.items(), key=lambda item: (item[1].start, item[0]))
    rows = [(f"  {name}", str(e.start), str(e.stop - e.start), _shape(e.shape)) for name, e in entries]
    return text.table(("  name", "start", "numel", "shape"), rows, left=("  name", "shape"))


def _shards(manifest: ShardManifest) -> str:
    rows = [
        (
            f"  {shard.rank}",
            shard.path,
            text.size(shard.nbytes),
            _number(shard.param_shard_offset),
            _number(shard.param_shard_numel),
            shard.sha256[:12],
            shard.crc32c,
        )
        for shard in manifest.shards
    ]
    header = ("  rank", "file", "bytes", "offset", "numel", "sha256", "crc32c")
    return text.table(header, rows, left=("file",))


def _here(directory: Path, manifest: ShardManifest) -> str:
    """What lies in a node's directory, a line for each rank of whose files there is one."""
    found = {d.mine.file: d for d in survey(directory, manifest.save_id).descriptors}
    nbytes = {path.name: text.size(path.lstat().st_size) for path in names.own_files(directory)}
    rows = []
    for shard in manifest.shards:
        sizes = [nbytes.get(name, "-") for name in (shard.path, parity_name(shard.path))]
        group = found.get(shard.path)
        if group or sizes != ["-", "-"]:
            rows.append((f"  {shard.rank}", *sizes, *(_protection(group) if group else ("-", "-", "-"))))
    header = ("  rank", "shard", "parity", "scheme", "survives", "group")
    return text.table(header, rows, left=("scheme", "survives", "group"))


def _protection(group: Descriptor) -> tuple[str, str, str]:
    lost, promised = group.tolerance, group.scheme.tolerance
    survives = f"{lost} lost{f', not {promised}' if lost < promised else ''}"
    return str(group.scheme), survives, ", ".join(map(str, group.ranks))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
