"""`mpi_ckpt.read`: any region of any array or named parameter, from a directory or straight from a remote tier."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpi_ckpt import CorruptShard, LayoutMismatch, MissingShard, NoCheckpoint, RemoteRefused, read
from mpi_ckpt.storage.remote_steps import read_upload_manifest
from tests.checkpoints import manifest_of
from tests.programs.tool_states import INDEX, arrays
from tests.storage_cases import MIB, same_bits
from tests.tool_cases import copy_of_run, verb

REGIONS = {
    "field/tiles": (slice(20, 41), slice(2, 5)),  # of all four ranks' tiles
    "interleaved": slice(100, 900),
    "table": (slice(3, 4),),
    "scalar": (),
    "empty": None,
    "m": slice(57, 60),
}


@pytest.fixture
def uploaded(remote, tmp_path):
    """The URL of a remote tier with steps 10 and 20; what is read from there, not from the run, is the copy."""
    run = copy_of_run(tmp_path)
    for step in (10, 20):
        assert verb("push", run, "--remote", remote.url, "--step", step).status == 0
    return remote


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_of_an_array_is_that_of_the_array_that_was_saved(uploaded, tmp_path, name):
    region = REGIONS[name]
    expected = arrays(20)[name][() if region is None else region]
    for root in (
        uploaded.url,
        tmp_path / "run" / "checkpoints",
        str(tmp_path / "run" / "checkpoints"),
        tmp_path / "run",
    ):
        assert same_bits(read(root, 20, name, region), expected)
    assert same_bits(read(uploaded.url, 10, name), arrays(10)[name])
    assert same_bits(read(uploaded.url, None, name), arrays(20)[name]), "the newest of the remote tier"


def test_a_named_parameter_is_read_from_any_array_of_the_flat_space(uploaded):
    for name, (start, shape) in INDEX.items():
        flat = arrays(20)["m"][start : start + int(np.prod(shape))]
        assert same_bits(read(uploaded.url, 20, f"m:{name}"), flat.reshape(shape))
    weight = arrays(20)["param"][399:799].reshape(20, 20)
    assert same_bits(read(uploaded.url, None, "blocks.0.fc.weight", (slice(3, 9), slice(17, 20))), weight[3:9, 17:20])


def test_only_the_chunks_that_hold_the_region_come_over_the_network(launch, s3, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.env["AWS_ENDPOINT_URL"])  # this process too goes through the proxy
    n = 3_000_000  # float64: 12 MB for each of two ranks
    about = {"root": str(tmp_path / "run"), "remote": s3.url, "elements": n, "save": [10]}
    launch.start(2, "-m", "tests.programs.uploader", json.dumps(about), env=s3.env).wait().check()

    def received(region: slice) -> tuple[int, set[str]]:
        """Bytes of shards that came, and which shards; the region is right."""
        before = len(s3.proxy.requests)
        assert np.array_equal(read(s3.url, 10, "x", region), np.arange(n)[region] + 10 / 1000)
        gets = [r for r in s3.proxy.requests[before:] if r.method == "GET" and r.path.endswith(".h5")]
        return sum(r.received for r in gets), {r.path[-len("rank00000.h5") :] for r in gets}

    slack = 4096  # the tables of checksums, and what HTTP says of each answer
    nbytes, shards = received(slice(1_000_000, 1_000_010))
    assert shards == {"rank00000.h5"}
    assert MIB <= nbytes < MIB + slack
    nbytes, shards = received(slice(n // 2 - 5, n // 2 + 5))  # the last chunk of one, the first of the other
    assert shards == {"rank00000.h5", "rank00001.h5"}
    assert nbytes < 2 * MIB + slack


@pytest.mark.parametrize(
    ("damage", "kind"), [("flipped", CorruptShard), ("short", CorruptShard), ("gone", MissingShard)]
)
def test_damage_is_an_error_that_names_the_object_and_only_where_it_is_needed(uploaded, tmp_path, damage, kind):
    manifest = read_upload_manifest(uploaded.store, 20)
    key = f"step_00000020/{manifest.save_id}/rank00001.h5"
    data = bytearray(uploaded.store.get(key)[0])
    (block,) = manifest_of(tmp_path / "run" / "checkpoints", 20)["shards"][1]["blocks"]["m"]
    data[block["offset"] + 3] ^= 1
    uploaded.store.delete([key])
    if damage != "gone":
        uploaded.store.put(key, bytes(data) if damage == "flipped" else bytes(data[:-4]))
    with pytest.raises(kind) as caught:
        read(uploaded.url, 20, "m")
    assert (caught.value.path, caught.value.rank) == (f"{uploaded.url}/{key}", 1)
    assert same_bits(read(uploaded.url, 20, "m", slice(0, 200)), arrays(20)["m"][:200])


def test_what_is_not_there_or_cannot_be_is_said(uploaded):
    with pytest.raises(NoCheckpoint, match="step 30 is not in the remote tier") as caught:
        read(uploaded.url, 30, "m")
    assert caught.value.path == uploaded.url
    with pytest.raises(NoCheckpoint, match="no step in the remote tier"):
        read(f"{uploaded.url}/nothing", None, "m")
    with pytest.raises(LayoutMismatch, match="neither an array nor a named parameter"):
        read(uploaded.url, 20, "blocks.7")
    with pytest.raises(LayoutMismatch, match="at most 1 slices"):
        read(uploaded.url, 20, "m", (slice(3), slice(3)))
    with pytest.raises(ValueError, match="only local files can be mapped"):
        read(uploaded.url, 20, "m", verify="none")
    with pytest.raises(RemoteRefused, match="s3://bucket/prefix or file:///directory"):
        read("gopher://x/y", 20, "m")


def test_an_unverified_region_of_one_local_block_is_mapped_and_cannot_be_written(tmp_path):
    root = copy_of_run(tmp_path) / "checkpoints"
    found = read(root, 20, "m", slice(3, 40), verify="none")
    assert same_bits(found, arrays(20)["m"][3:40])
    assert not found.flags.writeable
