"""`export` and `import`: named parameters as safetensors and back."""

from __future__ import annotations

import json
import math
import shutil
import struct

import numpy as np
import pytest

from mpi_ckpt.tools import source
from tests.checkpoints import manifest_of, step_dir, write_manifest
from tests.programs.tool_states import INDEX, arrays
from tests.tool_cases import copy_of_run, flip_in_array, verb


@pytest.fixture
def run(tmp_path):
    return copy_of_run(tmp_path)


def library():
    return pytest.importorskip("safetensors.numpy", reason="the safetensors package is the oracle here")


def expected(step=30, key="param"):
    flat = arrays(step)[key]
    return {name: flat[a : a + math.prod(shape)].reshape(shape) for name, (a, shape) in INDEX.items()}


def loaded(directory):
    """All tensors of a model, as the safetensors package reads them, found as Hugging Face's libraries find them."""
    load = library().load_file
    if (directory / "model.safetensors").exists():
        return load(directory / "model.safetensors")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load(directory / file)
        assert part.keys() == {name for name, where in index["weight_map"].items() if where == file}
        found |= part
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in found.values())
    return found


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


# -- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "flag"), [("param", []), ("master", ["--array", "master"]), ("m", ["--array", "m"])])
@pytest.mark.parametrize("size", ["5GB", "1KB", "1B"])
def test_an_export_loads_in_the_safetensors_package(run, tmp_path, monkeypatch, key, flag, size):
    monkeypatch.setattr(source, "WINDOW_BYTES", 1000 if size == "1KB" else source.WINDOW_BYTES)
    said = verb("export", run, "--out", tmp_path / "model", "--max-shard-size", size, *flag)
    assert said.status == 0, said
    same(loaded(tmp_path / "model"), expected(key=key))
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    if size == "5GB":
        assert files == ["model.safetensors"]
    else:
        n = len(files) - 1
        assert files == [
            *(f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)),
            "model.safetensors.index.json",
        ]


def test_no_file_is_larger_than_asked_for_unless_one_parameter_is(run, tmp_path):
    verb("export", run, "--out", tmp_path / "model", "--max-shard-size", "850B")
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    held = {}
    for name, file in index["weight_map"].items():
        held.setdefault(file, []).append(expected()[name].nbytes)
    assert all(sum(sizes) <= 850 or len(sizes) == 1 for sizes in held.values())
    assert len(held) == 3


def test_the_header_says_what_other_libraries_ask_for(run, tmp_path):
    verb("export", run, "--out", tmp_path / "model", "--step", 20)
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    document = json.loads(data[8 : 8 + length])
    assert document["__metadata__"]["format"] == "pt"
    assert document["__metadata__"]["step"] == "20"


@pytest.mark.parametrize(("first", "second"), [("1KB", "5GB"), ("5GB", "1KB"), ("1B", "1KB"), ("1KB", "1KB")])
def test_a_new_export_replaces_an_earlier_one_whole_and_nothing_else(run, tmp_path, first, second):
    model = tmp_path / "model"
    model.mkdir()
    others = {"config.json", "tokenizer.safetensors", "model.safetensors.bak", "model-1-of-2.safetensors"}
    for name in others:
        (model / name).write_text("mine")
    verb("export", run, "--out", model, "--step", 10, "--max-shard-size", first)
    for name in ("model-00001-of-00009.safetensors", "model.safetensors", "model-00001-of-00003.safetensors"):
        (model / f"{name}.tmp").write_text("of an export that was killed")
    assert verb("export", run, "--out", model, "--step", 30, "--max-shard-size", second).status == 0
    same(loaded(model), expected())
    clean = tmp_path / "clean"
    verb("export", run, "--out", clean, "--step", 30, "--max-shard-size", second)
    assert {path.name for path in model.iterdir()} == {path.name for path in clean.iterdir()} | others


def test_a_failed_export_leaves_the_earlier_one_whole(run, tmp_path):
    model, root = tmp_path / "model", run / "checkpoints"
    verb("export", run, "--out", model, "--step", 10, "--max-shard-size", "1KB")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    damaged = flip_in_array(root, 30, 3, "param")
    said = verb("export", run, "--out", model)
    assert said.status == 1
    assert str(damaged) in said.err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_a_model_of_another_program_is_not_touched(run, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    library().save_file({"x": np.arange(7)}, model / "model.safetensors")
    before = (model / "model.safetensors").read_bytes()
    said = verb("export", run, "--out", model)
    assert said.status == 1
    assert "model.safetensors" in said.err
    assert (model / "model.safetensors").read_bytes() == before


def test_parameters_are_needed_to_export_any(run, tmp_path):
    document = manifest_of(run / "checkpoints", 30)
    document["index"] = {}
    write_manifest(run / "checkpoints", 30, document)
    said = verb("export", run, "--out", tmp_path / "model")
    assert said.status == 1
    assert "index" in said.err
    assert not (tmp_path / "model").exists()


# -- import ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "ranks"), [("5GB", 1), ("1KB", 1), ("1KB", 3)])
def test_import_is_the_inverse_of_export(run, tmp_path, size, ranks):
    verb("export", run, "--out", tmp_path / "model", "--max-shard-size", size)
    said = verb("import", tmp_path / "model", "--out", tmp_path / "back", "--step", 7, "--ranks", ranks)
    assert said.status == 0, said
    document = manifest_of(tmp_path / "back", 7)
    assert document["world_size"] == ranks
    assert document["arrays"] == {"param": {"dtype": "<f2", "shape": [1009]}}
    assert document["index"] == manifest_of(run / "checkpoints", 30)["index"]
    assert verb("verify", tmp_path / "back").status == 0
    (tmp_path / "again").mkdir()
    verb("export", tmp_path / "back", "--out", tmp_path / "again", "--max-shard-size", size)
    same(loaded(tmp_path / "again"), expected())
    found = verb("diff", run, tmp_path / "back", "--only-arrays", "--json").json["differences"]
    assert {each["name"] for each in found} == arrays(30).keys() - {"param"}  # the rest is not there, `param` is equal


def test_a_model_of_the_safetensors_package_can_be_imported(tmp_path):
    tensors = {f"layer.{i}": np.random.default_rng(i).standard_normal((i, 7)).astype("<f4") for i in range(12)}
    library().save_file(tensors, tmp_path / "weights.safetensors", metadata={"origin": "elsewhere"})
    assert (
        verb("import", tmp_path / "weights.safetensors", "--out", tmp_path / "run", "--array", "optimizer/param").status
        == 0
    )
    meta = manifest_of(tmp_path / "run", 0)["meta"]["imported"]
    assert meta == {"files": ["weights.safetensors"], "dtypes": ["F32"], "metadata": {"origin": "elsewhere"}}
    verb("export", tmp_path / "run", "--out", tmp_path / "model")
    same(loaded(tmp_path / "model"), tensors)


def write_model(path, tensors):
    """A safetensors file by hand: {name: (dtype, array of the bytes' type)}."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_floating_types_are_widened_exactly_and_only_when_asked_for(tmp_path):
    every = np.arange(2**16, dtype="<u2")
    halves = np.linspace(-2, 2, 57).astype("<f2")
    write_model(
        tmp_path / "m.safetensors", {"b": ("BF16", every), "h": ("F16", halves), "s": ("F32", np.ones((), "<f4"))}
    )
    said = verb("import", tmp_path / "m.safetensors", "--out", tmp_path / "run")
    assert (said.status, "--widen" in said.err) == (1, True)
    assert not list((tmp_path / "run").glob("step_*"))
    assert verb("import", tmp_path / "m.safetensors", "--out", tmp_path / "run", "--widen").status == 0
    verb("export", tmp_path / "run", "--out", tmp_path / "model")
    found = loaded(tmp_path / "model")
    assert {array.dtype.str for array in found.values()} == {"<f4"}
    assert (found["b"].view("<u4") >> 16 == every).all()  # bfloat16 is the upper half of a float32
    assert (found["b"].view("<u4") & 0xFFFF == 0).all()
    assert found["h"].tobytes() == halves.astype("<f4").tobytes()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], "bytes, as the header says"),
        (lambda data: data + b"1", "bytes, as the header says"),
        (lambda data: b"", "header within the file"),
        (lambda data: struct.pack("<Q", 2**40) + data[8:], "header within the file"),
        (lambda data: data.replace(b'"F32"', b'"F64"'), "bytes of its shape"),
        (lambda data: data.replace(b'"F32"', b'"E4M"'), "E4M"),
        (lambda data: data.replace(b"[0,28]", b"[4,32]"), "bytes of its shape"),
        (lambda data: data.replace(b'{"shape', b'["shape'), "JSON"),
        (lambda data: data.replace(b"[0,28]", b"[0,-8]"), "no valid place"),
    ],
)
def test_a_damaged_model_is_refused_by_name(tmp_path, damage, words):
    header = b'{"x":{"shape":[7],"dtype":"F32","data_offsets":[0,28]}}'
    good = struct.pack("<Q", len(header)) + header + np.arange(7, dtype="<f4").tobytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(good)
    assert verb("import", tmp_path, "--out", tmp_path / "good").status == 0
    assert damage(good) != good
    path.write_bytes(damage(good))
    said = verb("import", tmp_path, "--out", tmp_path / "bad")
    assert said.status == 1, said
    assert str(path) in said.err
    assert words in said.err


def test_an_index_must_agree_with_its_files(run, tmp_path):
    model = tmp_path / "model"
    verb("export", run, "--out", model, "--max-shard-size", "1KB")
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, second = sorted(set(index["weight_map"].values()))[:2]
    for change, status in (
        ({"more.weight": first}, 1),
        ({"wte.weight": second}, 1),
        ({"wte.weight": "../model.safetensors"}, 1),
        ({"wte.weight": "gone.safetensors"}, 3),
    ):
        path.write_text(json.dumps(index | {"weight_map": index["weight_map"] | change}))
        assert verb("import", model, "--out", tmp_path / "back").status == status
    shutil.rmtree(model)
    assert verb("import", model, "--out", tmp_path / "back").status == 3
    assert not step_dir(tmp_path / "back", 0).exists()


def test_ranks_restore_an_imported_model_by_key(run, tmp_path, launch):
    verb("export", run, "--out", tmp_path / "model")
    verb("import", tmp_path / "model", "--out", tmp_path / "back")
    program = tmp_path / "restore.py"
    program.write_text(
        "import sys; import numpy as np; from mpi4py import MPI\n"
        "from mpi_ckpt import Checkpointer, Shard, shard_range\n"
        "from tests.programs.tool_states import N, arrays\n"
        "comm = MPI.COMM_WORLD; a, b = shard_range(N, comm.size, comm.rank); mine = np.empty(b - a, '<f2')\n"
        "state = {'param': Shard(mine, a, N), 'step': 0}\n"
        "with Checkpointer(sys.argv[1], comm, read_only=True) as ckpt:\n"
        "    ckpt.restore(state, keys=['param'], world_size='any')\n"
        "assert mine.tobytes() == arrays(30)['param'][a:b].tobytes()\n"
    )
    launch(3, str(program), str(tmp_path / "back")).check()
