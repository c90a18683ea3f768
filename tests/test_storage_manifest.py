"""The manifest: strict JSON with its own digest, read back as it was, and nothing in it trusted unchecked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_ckpt.errors import InvalidManifest, LayoutMismatch, NoCheckpoint, UnknownSchema, UnsupportedState
from mpi_ckpt.layout import Block, check_tiling, shard_range
from mpi_ckpt.storage import names
from mpi_ckpt.storage.manifest import (
    ArrayRecord,
    BlockRecord,
    ShardManifest,
    ShardRecord,
    ValuesRecord,
    build_manifest,
    flat_arrays,
    read_manifest,
    write_manifest,
)
from mpi_ckpt.storage.manifest_layout import check_tilings
from mpi_ckpt.storage.shard_file import check_structure, read_block
from tests.storage_cases import SAVE_ID, flat_manifest


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A committed step with real shards: its directory and manifest."""
    directory = names.step_dir(tmp_path_factory.mktemp("root"), 10)
    directory.mkdir()
    manifest = flat_manifest(directory)
    write_manifest(directory, manifest)
    return directory, manifest


def document(manifest: ShardManifest) -> dict:
    """The manifest as the standard parser sees it, to be changed and sealed again."""
    return json.loads(manifest.to_json())


def seal(content: dict) -> str:
    """A text whose digest fits its content, made by independent means: the definition in the design."""
    content = {key: value for key, value in content.items() if key != "manifest_sha256"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(content | {"manifest_sha256": hashlib.sha256(canonical.encode()).hexdigest()}, indent=1)


# -- the text ----------------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_back_as_it_was_written(step):
    directory, manifest = step
    assert read_manifest(directory) == manifest
    assert ShardManifest.from_json(manifest.to_json()) == manifest


def test_the_digest_is_that_of_the_canonical_json(step):
    content = document(step[1])
    assert json.loads(seal(content)) == content


def test_the_text_may_be_formatted_otherwise(step):
    manifest = step[1]
    assert ShardManifest.from_json(seal(document(manifest))) == manifest
    assert ShardManifest.from_json(manifest.to_json().replace("\n", "\r\n")) == manifest


def test_each_top_level_key_and_each_shard_has_a_line(step):
    manifest = step[1]
    lines = manifest.to_json().splitlines()
    for key in document(manifest):
        assert sum(line.startswith(f'"{key}":') for line in lines) == 1
    assert sum(line.startswith('{"blocks":') and '"sha256"' in line for line in lines) == manifest.world_size
    assert sum(line.startswith('"optimizer/master":') for line in lines) == 1


def test_the_text_is_the_same_every_time_and_has_the_fields_of_the_design(step):
    manifest = step[1]
    assert manifest.to_json() == ShardManifest.from_json(manifest.to_json()).to_json()
    content = document(manifest)
    assert (content["format"], content["schema_version"]) == ("mpi_ckpt", 1)
    assert content["arrays"]["optimizer/master"] == {"dtype": "<f4", "shape": [1009]}
    assert content["arrays"]["scalar"] == {"dtype": "<f8", "shape": [], "replicated": True}
    assert content["index"]["first.weight"] == {"start": 0, "shape": [57, 7]}
    assert content["wall_clock_seconds"] == 4.52
    shard = content["shards"][1]
    assert (shard["rank"], shard["path"]) == (1, "rank00001.h5")
    assert shard["param_shard_offset"] == 336
    assert shard["param_shard_numel"] == 336
    assert shard["blocks"]["optimizer/master"][0]["start"] == [336]
    assert set(shard["blocks"]["tiles"][0]) == {"start", "shape", "offset", "table_offset", "table_crc32c"}
    assert set(shard["values"]) == {"offset", "nbytes", "crc32c"}


def test_the_records_lead_to_the_bytes(step):
    directory, _ = step
    manifest = read_manifest(directory)
    whole = np.zeros(1009, "<f4")
    for shard in manifest.shards:
        check_structure(directory / shard.path, shard)
        for block in shard.blocks["optimizer/master"]:
            read_block(directory / shard.path, block, Block((0,), (1009,)), whole)
    assert np.array_equal(whole, np.arange(1009, dtype="<f4"))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
).filter(lambda value: "\ud800" not in repr(value))
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def manifests(draw):
    """Any manifest that is valid: arrays of any kind dealt to any number of ranks, with any meta."""
    size = draw(st.integers(1, 5))
    arrays = {}
    for key in draw(st.lists(TEXT, max_size=4, unique=True)):
        shape = tuple(draw(st.lists(st.integers(0, 50), max_size=3)))
        arrays[key] = ArrayRecord(draw(st.sampled_from(["|b1", "<f2", "<i8", "<c16"])), shape, draw(st.booleans()))
    shards = []
    for rank in range(size):
        blocks, at = {}, 4096
        for key, array in arrays.items():
            lo, hi = shard_range(array.shape[0], size, rank) if array.shape else (0, 1)
            if array.shape or rank == 0:
                start, shape = (
                    ((lo, *[0] * (len(array.shape) - 1)), (hi - lo, *array.shape[1:])) if array.shape else ((), ())
                )
                nbytes = int(np.prod(shape)) * np.dtype(array.dtype).itemsize
                blocks[key] = (BlockRecord(start, shape, at if nbytes else 0, at + nbytes, f"{rank:08x}"),)
                at += -(-(nbytes + 4) // 4096) * 4096
        digest = hashlib.sha256(bytes([rank])).hexdigest()
        suffix = draw(st.sampled_from([None, SAVE_ID]))
        values = ValuesRecord(at, 7, "0" * 8)
        shards.append(ShardRecord(rank, names.shard_name(rank, suffix), at + 7, digest, "0" * 8, blocks, values))
    return build_manifest(
        draw(st.permutations(shards)),
        step=draw(st.integers(0, 10**17)),
        save_id=SAVE_ID,
        arrays=arrays,
        index={},
        meta=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        environment=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        created=draw(TEXT),
        wall_clock_seconds=draw(st.floats(0, 1e300)),
    )


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(manifest=manifests())
def test_any_manifest_comes_back_and_any_parser_agrees_on_its_digest(manifest):
    text = manifest.to_json()
    assert ShardManifest.from_json(text) == manifest
    content = json.loads(text)
    assert json.loads(seal(content)) == content
    assert ShardManifest.from_json(seal(content)) == manifest


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_changed_byte_anywhere_is_refused(step, data):
    manifest = step[1]
    text = bytearray(manifest.to_json().encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] ^= 1 << data.draw(st.integers(0, 6))
    try:
        changed = text.decode()
    except UnicodeDecodeError:
        return
    try:
        found = ShardManifest.from_json(changed)
    except InvalidManifest:
        return
    assert found == manifest  # white space became other white space


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(text: str, *named: str) -> InvalidManifest:
    with pytest.raises(InvalidManifest) as caught:
        ShardManifest.from_json(text, "step_00000010/manifest.json")
    error = caught.value
    for name in named:
        assert name in str(error)
    assert error.path == "step_00000010/manifest.json"
    assert error.found is not None
    assert error.expected is not None
    assert error.action is not None
    return error


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "7", "{}", '{"manifest_sha256": 7}', "[" * 100_000, "\0", "{'a': 1}"]
)
def test_what_is_no_document_is_refused(text):
    refused(text, "manifest")


def test_a_flipped_digit_in_meta_or_index_is_refused(step):
    text = step[1].to_json()
    for old, new in (('"loss":3.25', '"loss":3.26'), ('"start":399', '"start":398'), ('"step":10', '"step":11')):
        assert text.count(old) == 1
        refused(text.replace(old, new), "manifest_sha256")


def test_duplicate_keys_and_constants_outside_json_are_refused(step):
    text = step[1].to_json()
    for old, new, named in (
        ('"step":10', '"step":9,"step":10', "duplicate key 'step'"),
        ('"loss":3.25', '"loss":3.25,"loss":3.25', "duplicate key 'loss'"),
        ('"loss":3.25', '"loss":NaN', "NaN"),
        ('"loss":3.25', '"loss":-Infinity', "-Infinity"),
        ('"loss":3.25', '"loss":1e999', "1e999"),
    ):
        refused(text.replace(old, new), named)


def test_a_newer_schema_is_refused_by_its_number(step):
    content = document(step[1]) | {"schema_version": 2, "step": {"of": "another kind"}}
    with pytest.raises(UnknownSchema, match="schema_version 2"):
        ShardManifest.from_json(seal(content))


def test_unknown_fields_are_ignored(step):
    content = document(step[1])
    content["later"] = {"a": 1}
    content["shards"][0]["later"] = content["arrays"]["scalar"]["later"] = [1]
    content["shards"][0]["blocks"]["scalar"][0]["later"] = "x"
    assert ShardManifest.from_json(seal(content)) == step[1]


SHARD_FIELDS = ["rank", "path", "nbytes", "sha256", "crc32c", "blocks", "values"]
BLOCK_FIELDS = ["start", "shape", "offset", "table_offset", "table_crc32c"]
FIELDS = [
    *(
        (name,)
        for name in ("format", "schema_version", "save_id", "world_size", "step", "wall_clock_seconds", "created")
    ),
    *((name,) for name in ("environment", "meta", "arrays", "index", "shards")),
    *(("arrays", "tiles", name) for name in ("dtype", "shape")),
    *(("index", "first.weight", name) for name in ("start", "shape")),
    *(("shards", 1, name) for name in SHARD_FIELDS),
    *(("shards", 1, "values", name) for name in ("offset", "nbytes", "crc32c")),
    *(("shards", 2, "blocks", "tiles", 0, name) for name in BLOCK_FIELDS),
]


def at(content, path):
    for key in path:
        content = content[key]
    return content


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
def test_a_missing_field_is_refused_by_name(step, path):
    content = document(step[1])
    del at(content, path[:-1])[path[-1]]
    error = refused(seal(content), path[-1])
    assert error.found == "nothing"


@pytest.mark.parametrize("path", FIELDS, ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("wrong", [None, True, -1, 2**63, 1.5, "text", [], [-1], [1.0], {}, [[]]], ids=repr)
def test_a_value_of_the_wrong_type_or_out_of_bounds_is_refused_by_name(step, path, wrong):
    old, content = at(document(step[1]), path), document(step[1])
    if type(wrong) is type(old) and (not wrong or path[-1] == "created"):
        pytest.skip("as valid as any, or judged by its relation to other fields")
    if path[-1] in ("wall_clock_seconds", "environment", "meta") and wrong in (1.5, 2**63) and type(old) is float:
        pytest.skip("a fine number of seconds")
    at(content, path[:-1])[path[-1]] = wrong
    where = {"blocks": "", "arrays": ""}.get(path[-1], path[-1])
    refused(seal(content), where)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(format="other"), "format"),
        (lambda c: c.update(schema_version=0), "schema_version"),
        (lambda c: c.update(save_id="../etc"), "save_id"),
        (lambda c: c.update(world_size=4), "shards"),
        (lambda c: c.update(world_size=2), "shards"),
        (lambda c: c["shards"].pop(), "shards"),
        (lambda c: c["shards"].append(c["shards"][0]), "shards"),
        (lambda c: c["shards"][1].update(rank=0), "shards"),
        (lambda c: c["shards"][1].update(rank=7), "shards"),
        (lambda c: c["shards"][1].update(path="/etc/passwd"), "path"),
        (lambda c: c["shards"][1].update(path="../step_00000009/rank00001.h5"), "path"),
        (lambda c: c["shards"][1].update(path="sub/rank00001.h5"), "path"),
        (lambda c: c["shards"][1].update(path="rank00001.h5\0"), "path"),
        (lambda c: c["shards"][1].update(path="rank00002.h5"), "path"),
        (lambda c: c["shards"][1].update(path="manifest.json"), "path"),
        (lambda c: c["shards"][1].update(path="rank00001-ffffffffffffffff.h5"), "path"),
        (lambda c: c["shards"][1].update(sha256="A" * 64), "sha256"),
        (lambda c: c["shards"][1].update(sha256="a" * 63), "sha256"),
        (lambda c: c["shards"][1].update(crc32c="g" * 8), "crc32c"),
        (lambda c: c["shards"][1].update(nbytes=4096), "shards[1]"),
        (lambda c: c["shards"][1].update(param_shard_offset="0"), "param_shard_offset"),
        (lambda c: block(c).update(offset=block(c)["offset"] + 1), "offset"),
        (lambda c: block(c).update(offset=2**62 // 4096 * 4096), "tiles"),
        (lambda c: block(c).update(offset=c["shards"][1]["blocks"]["optimizer/param"][0]["offset"]), "tiles"),
        (lambda c: block(c).update(table_offset=block(c)["offset"]), "tiles"),
        (lambda c: block(c).update(table_offset=c["shards"][1]["nbytes"] - 3), "tiles"),
        (lambda c: c["shards"][1]["values"].update(offset=block(c)["offset"]), "values"),
        (lambda c: c["shards"][1]["values"].update(nbytes=2**60), "values"),
        (lambda c: block(c).update(start=[6, 0]), "overlap"),
        (lambda c: block(c).update(start=[8, 0]), "overlap"),
        (lambda c: block(c).update(shape=[6, 5]), "gap"),
        (lambda c: block(c).update(start=[16, 0]), "outside"),
        (lambda c: block(c).update(start=[7], shape=[7]), "axes"),
        (lambda c: block(c).update(start=[7, 0, 0]), "axes"),
        (lambda c: c["shards"][1]["blocks"].pop("tiles"), "gap"),
        (lambda c: c["shards"][1]["blocks"]["tiles"].append(block(c)), "overlap"),
        (lambda c: c["shards"][1]["blocks"].update(unknown=[block(c)]), "unknown"),
        (lambda c: c["shards"][1]["blocks"]["optimizer/master"][0].update(start=[335]), "overlap"),
        (lambda c: c["shards"][1]["blocks"]["optimizer/master"][0].update(shape=[335]), "gap"),
        (lambda c: c["arrays"]["tiles"].update(shape=[22, 5]), "gap"),
        (lambda c: c["arrays"]["tiles"].update(shape=[2**62, 2**62]), "gap"),
        (lambda c: c["arrays"]["tiles"].update(shape=[1] * 33), "shape"),
        (lambda c: c["arrays"]["tiles"].update(dtype="|O"), "dtype"),
        (lambda c: c["arrays"]["tiles"].update(dtype=">f8"), "dtype"),
        (lambda c: c["arrays"]["tiles"].update(dtype="<f16"), "dtype"),
        (lambda c: c["arrays"]["tiles"].update(replicated=1), "replicated"),
        (lambda c: c["arrays"].update(more={"dtype": "<f4", "shape": [3]}), "gap"),
        (lambda c: c["index"]["second.bias"].update(start=1000), "second.bias"),
        (lambda c: c["index"]["second.bias"].update(start=2**62), "second.bias"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(step, change, named):
    content = document(step[1])
    change(content)
    refused(seal(content), named)


def block(content):
    return content["shards"][1]["blocks"]["tiles"][0]


def test_the_directory_and_the_manifest_must_name_the_same_step(step, tmp_path):
    moved = tmp_path / "step_00000011"
    shutil.copytree(step[0], moved)
    with pytest.raises(InvalidManifest, match="step 10") as caught:
        read_manifest(moved)
    assert caught.value.path == str(moved / "manifest.json")


def test_a_step_without_a_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(NoCheckpoint, match="manifest"):
        read_manifest(tmp_path / "step_00000010")


def test_a_manifest_that_is_not_utf8_is_refused(tmp_path):
    directory = names.step_dir(tmp_path, 10)
    directory.mkdir()
    (directory / "manifest.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InvalidManifest, match="UTF-8"):
        read_manifest(directory)


# -- building ----------------------------------------------------------------------------------------------------------


def test_a_shard_interval_is_that_of_the_flat_parameter_space(step):
    manifest = step[1]
    assert flat_arrays(manifest.arrays) == ["optimizer/param", "optimizer/master"]
    found = [(shard.param_shard_offset, shard.param_shard_numel) for shard in manifest.shards]
    assert found == [(0, 336), (336, 336), (672, 337)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ({"a": (5,), "param": (3,), "b": (3,), "c": (4,)}, ["param", "b"]),
        ({"a": (5,), "x/param": (3,), "b": (3,)}, ["x/param", "b"]),
        ({"x/param": (3,), "y/param": (4,), "b": (9,), "c": (9,)}, ["b", "c"]),
        ({"a": (5,), "b": (9,), "c": (9, 1), "d": (9,)}, ["b", "d"]),
        ({"param": (3, 3), "s": ()}, []),
        ({}, []),
    ],
)
def test_the_flat_space_is_that_of_param_or_of_the_longest_line(shapes, expected):
    assert flat_arrays({key: ArrayRecord("<f4", shape) for key, shape in shapes.items()}) == expected


def test_without_an_index_or_param_there_is_no_shard_interval(tmp_path):
    manifest = flat_manifest(tmp_path)
    arrays = {key.replace("param", "weights"): array for key, array in manifest.arrays.items()}
    records = [
        shard._replace(
            blocks={key.replace("param", "weights"): held for key, held in shard.blocks.items()},
            param_shard_offset=None,
            param_shard_numel=None,
        )
        for shard in manifest.shards
    ]
    changes = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    changes = {k: v for k, v in changes.items() if k not in ("world_size", "shards")} | {"arrays": arrays, "index": {}}
    built = build_manifest(records, **changes)
    assert all(shard.param_shard_offset is None for shard in built.shards)
    assert "param_shard_offset" not in built.to_json()
    named = build_manifest(records, **(changes | {"index": {"w": (0, (7,))}}))
    assert named.shards[1].param_shard_numel == 336


@pytest.mark.parametrize(
    "meta", [{"x": float("nan")}, {"x": float("inf")}, {"x": {1, 2}}, {1: "a", "b": 2}, {"x": "\ud800"}]
)
def test_what_json_cannot_hold_is_refused_when_saving(tmp_path, meta):
    with pytest.raises(UnsupportedState, match="JSON"):
        flat_manifest(tmp_path, meta=meta).to_json()


def test_records_that_are_not_those_of_all_ranks_or_do_not_tile_are_refused_when_saving(step):
    manifest = step[1]
    changes = {field.name: getattr(manifest, field.name) for field in dataclasses.fields(manifest)}
    records = list(changes.pop("shards"))
    del changes["world_size"]
    for wrong in (records[1:], [*records, records[0]], [records[0], records[2]]):
        with pytest.raises(LayoutMismatch, match="ranks"):
            build_manifest(wrong, **changes)
    with pytest.raises(LayoutMismatch, match="gap"):
        build_manifest([*records[:2], records[2]._replace(blocks={})], **changes)
    with pytest.raises(LayoutMismatch, match=r"second\.bias"):
        build_manifest(records, **(changes | {"index": {"second.bias": (1000, (10,))}}))
    with pytest.raises(LayoutMismatch, match="third"):
        build_manifest(records, **(changes | {"index": {"third": (-1, (10,))}}))


@settings(max_examples=200, deadline=None)
@given(
    total=st.integers(0, 12),
    intervals=st.lists(st.tuples(st.integers(-2, 12), st.integers(-1, 12)), max_size=5),
)
def test_the_quick_tiling_check_agrees_with_the_careful_one(total, intervals):
    blocks = tuple(BlockRecord((a,), (n,), 0, 0, "") for a, n in intervals)
    shard = ShardRecord(0, "", 0, "", "", {"a": blocks}, ValuesRecord(0, 0, ""))

    def verdict(check):
        try:
            check()
        except LayoutMismatch:
            return False
        return True

    careful = verdict(lambda: check_tiling("a", (total,), [b.block for b in blocks]))
    assert verdict(lambda: check_tilings({"a": ArrayRecord("<f4", (total,))}, [shard])) == careful


def test_a_manifest_of_16384_ranks_comes_back(tmp_path):
    size, n = 16384, 9_000_000
    keys = ("param", "master", "m", "v")
    records = [
        ShardRecord(
            rank,
            names.shard_name(rank),
            200_000_000,
            hashlib.sha256(rank.to_bytes(4, "little")).hexdigest(),
            f"{rank:08x}",
            {
                key: (BlockRecord((rank * n,), (n,), 4096 + i * 40_960_000, 190_000_000 + 1000 * i, f"{rank:08x}"),)
                for i, key in enumerate(keys)
            },
            ValuesRecord(199_000_000, 100, "0" * 8),
        )
        for rank in range(size)
    ]
    directory = names.step_dir(tmp_path, 10)
    directory.mkdir()
    manifest = build_manifest(
        records,
        step=10,
        save_id=SAVE_ID,
        arrays={key: ArrayRecord("<f4", (size * n,)) for key in keys},
        index={"weight": (0, (size, n))},
        meta={},
        environment={},
        created="",
        wall_clock_seconds=0.0,
    )
    write_manifest(directory, manifest)
    found = read_manifest(directory)
    assert found == manifest
    assert os.listdir(directory) == ["manifest.json"]
