"""The public face: the ten lines as a program, the plain functions, the names, and what every docstring begins with."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pickle
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import mpi_ckpt
from mpi_ckpt import (
    Checkpointer,
    CheckpointError,
    CorruptShard,
    LayoutMismatch,
    MissingShard,
    NoCheckpoint,
    PerRank,
    Shard,
    ShardManifest,
    StepExists,
    WorldSizeMismatch,
    load_sharded,
    save_sharded,
    shard_range,
    verify_resume,
)
from mpi_ckpt.checkpoint.state import walk
from mpi_ckpt.comm.agreement import Council
from tests.checkpoints import bits, exact, flip, manifest_of, on_one, raised, same_bits, shard_file, step_dir
from tests.launch import HANG, ROOT

# -- the ten lines ---------------------------------------------------------------------------------------------------

TEN_LINES = """
from mpi4py import MPI
import numpy as np
from mpi_ckpt import Checkpointer, PerRank, Shard, shard_range

comm = MPI.COMM_WORLD
start, stop = shard_range(n_rows, comm.size, comm.rank)
u = np.zeros((stop - start, n_cols))                         # my rows of a global [n_rows, n_cols] field
rng = np.random.default_rng([seed, comm.rank])
state = {
    "u": Shard(u, start=(start, 0), shape=(n_rows, n_cols)), # any block of an N-d array, any decomposition
    "dt": 1e-3,                                              # replicated: equal on every rank, checked, stored once
    "rng": PerRank(rng),                                     # a Generator: read at each save, set at restore
}
with Checkpointer("run/checkpoints", comm, every="10min", keep=3) as ckpt:
    found = ckpt.restore(state)                              # in place; None if there is nothing yet
    for step in range(found.step + 1 if found else 1, n_steps + 1):
        advance(u)
        ckpt.save_if_due(step, state)                        # returns once the state is copied
"""
BEFORE = """
import sys
n_rows, n_cols, seed, n_steps = 7, 5, 3, int(sys.argv[1])

def advance(u):
    u += rng.standard_normal(u.shape)
"""
AFTER = """
line = f"rank {comm.rank}: from step {found.step if found else None}, dt {state['dt']}, {u.tobytes().hex()}"
lines = comm.gather(line)  # printed by one rank: the lines of several may mix
if comm.rank == 0:
    print(*lines, sep=chr(10), flush=True)
"""


def test_the_ten_lines_start_fresh_then_resume_to_the_bits_of_a_run_never_interrupted(launch):
    """The same program and command line for the first launch and for later ones; only the cadence is made shorter."""
    program = BEFORE + TEN_LINES.replace('"10min"', '"2steps"') + AFTER
    (launch.cwd / "solver.py").write_text(program)
    (launch.cwd / "elsewhere.py").write_text(program.replace("run/checkpoints", "whole/checkpoints"))

    def fields(outcome) -> list[str]:
        return sorted(line.split(", ")[0] + line.split(",")[-1] for line in outcome.check().stdout.splitlines())

    first = launch(3, "solver.py", "5")
    assert first.check().stdout.count("from step None, dt 0.001") == 3
    second = launch(3, "solver.py", "8")  # steps 2 and 4 were saved: step 5 is repeated
    assert second.check().stdout.count("from step 4, dt 0.001") == 3
    whole = launch(3, "elsewhere.py", "8")
    assert [line.split()[-1] for line in fields(second)] == [line.split()[-1] for line in fields(whole)]
    steps = sorted(path.name for path in (launch.cwd / "run/checkpoints").glob("step_*"))
    assert steps == ["step_00000004", "step_00000006", "step_00000008"]
    refused = launch(2, "-m", "mpi4py", "solver.py", "10")
    assert refused.status != 0
    assert "WorldSizeMismatch" in refused.stderr
    assert "world_size='any'" in refused.stderr


# -- the plain functions ---------------------------------------------------------------------------------------------


def state(comm, step: int) -> dict:
    start, stop = shard_range(1009, comm.size, comm.rank)
    array = bits((1009,), "<f4", step)
    several = [Shard(array[i : i + 1].copy(), i, 1009) for i in range(start, min(start + 2, stop))]
    several.append(Shard(array[start + len(several) : stop].copy(), start + len(several), 1009))
    return {
        "model": {
            "w": Shard(array[start:stop].copy(), start, 1009),
            "several": several,
            "bias": bits((3, 2), "<f2", step),
        },
        "step": step,
        "t": np.array(step),
        "config": {"betas": (0.9, 0.95), "names": {"a", "b"}},
        "rng": PerRank(np.random.default_rng([step, comm.rank])),
        "own": PerRank({"rank": comm.rank}),
        "shared": np.random.RandomState(step),
    }


@pytest.mark.mpi(ranks=[1, 4], timeout=60, unit="s")
def test_load_sharded_brings_back_this_rank_s_state_as_it_was_saved(comm, shared_path):
    root = shared_path / "c"
    with pytest.raises(NoCheckpoint):
        load_sharded(root, comm.size, comm)
    index = {"w": (0, (1000,)), "b": (1000, (9,))}
    saved = save_sharded(state(comm, 1), root, 1, comm, meta={"a": [1]}, index=index)
    assert saved == step_dir(root, 1)
    save_sharded(state(comm, 2), root, 2, comm)
    for step, asked in ((2, None), (1, 1)):
        found, manifest = load_sharded(root, comm.size, comm, asked)
        assert isinstance(manifest, ShardManifest)
        assert (manifest.step, manifest.world_size) == (step, comm.size)
        expected = state(comm, step)
        mine, theirs = walk(found), walk(expected)
        assert mine.kinds == theirs.kinds
        for key, shards in theirs.shards.items():
            assert [s.block for s in mine.shards[key]] == [s.block for s in shards]
            assert all(same_bits(a.array, b.array) for a, b in zip(mine.shards[key], shards, strict=True))
        assert all(same_bits(mine.arrays[key], array) for key, array in theirs.arrays.items())
        assert exact([found["step"], found["config"]]) == exact([expected["step"], expected["config"]])
        assert found["own"].value == {"rank": comm.rank}
        assert found["rng"].value.random(3).tolist() == expected["rng"].value.random(3).tolist()
        assert found["shared"].random_sample(3).tolist() == expected["shared"].random_sample(3).tolist()
        assert verify_resume(state(comm, step), root, step, comm).save_id == manifest.save_id
    assert load_sharded(root, comm.size, comm, 1)[1].meta == {"a": [1]}
    assert ShardManifest.from_json(manifest.to_json()) == manifest
    raised(comm, StepExists, lambda: save_sharded(state(comm, 3), root, 2, comm))
    save_sharded(state(comm, 3), root, 2, comm, overwrite=True)
    verify_resume(state(comm, 3), root, 2, comm)


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_the_plain_functions_fail_as_loudly_as_the_checkpointer(comm, shared_path):
    root = shared_path / "c"
    save_sharded(state(comm, 1), root, 1, comm)
    save_sharded(state(comm, 2), root, 2, comm)
    raised(comm, NoCheckpoint, lambda: load_sharded(root, comm.size, comm, 3))
    error = raised(comm, WorldSizeMismatch, lambda: load_sharded(root, 4, comm))
    assert "4 ranks" in str(error)
    document = manifest_of(root, 2)
    assert len(document["shards"]) == document["world_size"] == 3
    last = comm.rank == comm.size - 1
    for change in (
        lambda s: np.invert(s["model"]["w"].array[5:6].view("u4"), out=s["model"]["w"].array[5:6].view("u4")),
        lambda s: np.negative(s["model"]["several"][-1].array[-1:], out=s["model"]["several"][-1].array[-1:]),
        lambda s: s.update(step=3),
        lambda s: s["rng"].value.random(),
        lambda s: s.pop("own"),
        lambda s: s.update(new=1),
    ):
        mine = state(comm, 2)
        if last:
            change(mine)
        error = raised(comm, CorruptShard, lambda mine=mine: verify_resume(mine, root, 2, comm))
        assert error.rank == comm.size - 1
    comm.Barrier()
    on_one(comm, lambda: flip(shard_file(root, 2, 1), -1))
    raised(comm, CorruptShard, lambda: load_sharded(root, comm.size, comm))
    raised(comm, CorruptShard, lambda: verify_resume(state(comm, 2), root, 2, comm))
    on_one(comm, lambda: shard_file(root, 1, 2).unlink())
    error = raised(comm, MissingShard, lambda: load_sharded(root, comm.size, comm, 1))
    assert "rank00002.h5" in str(error)
    assert (step_dir(root, 2) / "manifest.json").exists(), "reading sets nothing aside"


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_any_communicator_will_do(comm, shared_path):
    """Split, Cartesian, reordered: ranks are those of the communicator that was passed in."""
    halves = comm.Split(comm.rank % 2)
    grid = comm.Create_cart((2, 2), periods=(True, False))
    backwards = comm.Split(0, -comm.rank)
    for name, part in ((f"half {comm.rank % 2}", halves), ("grid", grid), ("backwards", backwards)):
        root = shared_path / name
        with Checkpointer(root, part) as checkpointer:
            checkpointer.save(
                1, {"own": PerRank(comm.rank), "a": Shard(np.full(2, part.rank), 2 * part.rank, 2 * part.size)}
            )
            target = {"own": PerRank(None), "a": Shard(np.full(2, -1), 2 * part.rank, 2 * part.size)}
            checkpointer.restore(target)
        assert target["own"].value == comm.rank
        assert target["a"].array.tolist() == [part.rank] * 2
        assert manifest_of(root, 1)["world_size"] == part.size
        part.Free()


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_bad_index_is_refused_by_the_save_that_it_was_given_to_and_numpy_integers_are_fine(comm, shared_path):
    start, stop = shard_range(57, comm.size, comm.rank)
    state = {"param": Shard(np.zeros(stop - start), start, 57)}
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        for entry in ((50, (8,)), (-1, (2,)), (0, 57), (0.0, (57,)), "ab", 7):
            error = raised(comm, LayoutMismatch, lambda entry=entry: checkpointer.save(1, state, index={"w": entry}))
            assert "'w'" in str(error)
        assert checkpointer.latest_step() is None
        checkpointer.save(1, state, index={"w": (np.int64(3), np.array([6, 9]))})
    assert manifest_of(shared_path / "c", 1)["index"] == {"w": {"start": 3, "shape": [6, 9]}}


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_a_closed_checkpointer_says_so_and_closing_again_is_fine(comm, shared_path):
    checkpointer = Checkpointer(shared_path / "c", comm)
    checkpointer.save(1, {"n": 1})
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.save(2, {"n": 2}),
        lambda: checkpointer.save_if_due(2, {"n": 2}),
        lambda: checkpointer.restore({"n": 0}),
        checkpointer.all_steps,
        lambda: checkpointer.discard_after(0),
    ):
        assert "closed" in str(raised(comm, CheckpointError, call))


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_background_nice_lowers_the_threads_that_write_and_no_other(comm, shared_path):
    nice = []

    def on_event(event):
        nice.append((event["event"], os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with Checkpointer(shared_path / "c", comm, background_nice=3, on_event=on_event) as checkpointer:
        checkpointer.save(1, {"a": Shard(np.zeros(8), 8 * comm.rank, 8 * comm.size)})
    assert sorted(nice) == [("checkpoint", before), ("commit", min(19, before + 3))]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    with pytest.raises(ValueError, match="background_nice"):
        Checkpointer(shared_path / "d", comm, background_nice=20)


# -- names and docstrings --------------------------------------------------------------------------------------------


def test_every_public_name_is_there_and_typed_and_nothing_starts_mpi_by_being_named():
    package = Path(mpi_ckpt.__file__)
    assert (package.parent / "py.typed").exists()
    typed = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(package.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mpi_ckpt.")
        for alias in node.names
    }
    assert typed == set(mpi_ckpt.__all__), "what a type checker sees and what exists"
    assert {"Checkpointer", "PerRank", "Shard", "shard_range", "save_sharded", "load_sharded", "verify_resume",
            "ShardManifest", "MiniGPT", "make_corpus"} <= typed  # fmt: skip
    assert set(dir(mpi_ckpt)) >= typed
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mpi_ckpt.nothing  # noqa: B018
    code = "from mpi_ckpt import *; import sys; assert 'mpi4py.MPI' not in sys.modules; assert Checkpointer and Shard"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=HANG)


def public_functions(where: object) -> dict[str, Callable]:
    return {
        name: member
        for name, member in vars(where).items()
        if inspect.isfunction(member) and (not name.startswith("_") or name == "__init__")
    }


def test_every_public_method_says_first_whether_all_ranks_must_call_it():
    functions = {f"Checkpointer.{name}": f for name, f in public_functions(Checkpointer).items()}
    functions |= {f"Council.{name}": f for name, f in public_functions(Council).items()}
    for module in pkgutil.walk_packages(mpi_ckpt.__path__, "mpi_ckpt."):
        if module.name.startswith(("mpi_ckpt.checkpoint.", "mpi_ckpt.comm.", "mpi_ckpt.redundancy.")):
            found = importlib.import_module(module.name)
            functions |= {
                f"{module.name}.{name}": function
                for name, function in public_functions(found).items()
                if {"comm", "council"} & set(inspect.signature(function).parameters)
            }
    assert {"mpi_ckpt.checkpoint.sharded.save_sharded", "mpi_ckpt.checkpoint.commit.commit"} <= set(functions)
    for name, function in functions.items():
        text = inspect.getdoc(function) or ""
        assert text.startswith(("**Collective.** ", "**Local.** ")), f"{name}: {text[:40]!r}"
    for name in ("__init__", "save", "save_if_due", "restore", "all_steps", "latest_step", "discard_after", "close"):
        assert inspect.getdoc(vars(Checkpointer)[name]).startswith("**Collective.** "), name


def test_every_error_is_a_checkpoint_error_that_says_where_what_and_what_next_and_travels_between_ranks():
    errors = [getattr(mpi_ckpt, name) for name in mpi_ckpt.__all__]
    errors = [e for e in errors if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) >= 12
    for kind in errors:
        assert issubclass(kind, CheckpointError)
        assert (kind.__doc__ or "").strip()
        error = kind("it broke", path="/a/b", rank=3, found="x", expected="y", action="Do z.")
        assert str(error) == "it broke (file /a/b, rank 3); found x; expected y. Do z."
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is kind
        assert (str(copied), copied.rank, copied.path) == (str(error), 3, "/a/b")
