"""Asynchronous saving: what a step holds is the state at the moment `save` was called, whatever happens after it."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_ckpt import Checkpointer, PerRank, SaveFailed, Shard, shard_range
from mpi_ckpt.checkpoint.snapshot import Buffers
from tests.checkpoints import bits, counting, exact, manifest_of, poisoned, raised, same_bits, step_dir

N = 600_011  # elements: a few MiB, so that the writer is still busy when the application goes on


def shard(comm, array: np.ndarray) -> Shard:
    start, stop = shard_range(len(array), comm.size, comm.rank)
    return Shard(array[start:stop], start, array.shape)


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_the_restored_state_is_the_one_before_whatever_changes_after_save_returned(comm, shared_path):
    base = counting((N,))
    window = base[100:-100]  # memory shared with what the application goes on with
    mine = shard(comm, window)
    twice = Shard(mine.array, mine.block.start, mine.shape)  # the same memory under a second key
    counter, table = np.array(7), np.arange(12.0).reshape(3, 4)
    history: list[Any] = [1, [2, {"three": [3]}], bytearray(b"abc"), np.arange(3)]
    settings = {"lr": 0.1, "betas": [0.9, 0.95], "names": {"a"}}
    meta, metrics, index = {"losses": [1.0]}, {"loss": 1.0}, {"w": (0, (3, 5))}
    rng, twister, shared = np.random.default_rng(comm.rank), random.Random(comm.rank), np.random.RandomState(3)
    own = PerRank({"seen": [comm.rank]})
    state = {
        "a": mine, "b": {"again": twice, "table": table.T, "counter": counter}, "history": history,
        "settings": settings, "rng": PerRank(rng), "twister": PerRank(twister), "shared": shared, "own": own, "step": 1,
    }  # fmt: skip
    expected = {"a": mine.array.copy(), "table": table.T.copy()}
    expected |= {"history": exact(copy.deepcopy(history)), "settings": exact(copy.deepcopy(settings))}
    expected |= {"rng": rng.bit_generator.state, "twister": twister.getstate()}
    expected |= {"shared": exact(shared.get_state(legacy=False))}
    with Checkpointer(shared_path / "c", comm) as checkpointer:
        checkpointer.save(1, state, meta=meta, metrics=metrics, index=index)
        base += 1
        table *= 2
        counter[...] = 8
        history[1][1]["three"].append(4)
        history[2][0] = 0
        history[3][:] = -1
        history.clear()
        settings["betas"][0] = 0.0
        settings["names"].add("b")
        meta["losses"].append(2.0)
        metrics["loss"] = 2.0
        index["w"] = (3, (5,))
        own.value["seen"].append(99)
        state["step"] = 2
        rng.random(1000), twister.random(), shared.random_sample(5)
        target = {
            "a": shard(comm, poisoned(window.shape, "<f8")),
            "b": {"again": shard(comm, poisoned(window.shape, "<f8")), "table": poisoned((4, 3), "<f8"),
                  "counter": poisoned((), "<i8")},
            "history": None, "settings": None, "rng": PerRank(np.random.default_rng(9)), "own": PerRank(None),
            "twister": PerRank(random.Random(9)), "shared": np.random.RandomState(9), "step": None,
        }  # fmt: skip
        found = checkpointer.restore(target)
    assert same_bits(target["a"].array, expected["a"])
    assert same_bits(target["b"]["again"].array, expected["a"])
    assert same_bits(target["b"]["table"], expected["table"])
    assert target["b"]["counter"] == 7
    assert exact(target["history"]) == expected["history"]
    assert exact(target["settings"]) == expected["settings"]
    assert target["own"].value == {"seen": [comm.rank]}
    assert target["step"] == 1
    assert target["rng"].value.bit_generator.state == expected["rng"]
    assert target["twister"].value.getstate() == expected["twister"]
    assert exact(target["shared"].get_state(legacy=False)) == expected["shared"]
    assert found.meta == {"losses": [1.0]}
    assert dict(found.manifest.metrics) == {"loss": 1.0}
    assert found.manifest.index["w"] == (0, (3, 5))


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_nothing_of_the_application_needs_to_live_on_after_save_returned(comm, shared_path):
    root = shared_path / "c"

    def save(checkpointer: Checkpointer, step: int) -> None:
        array = counting((N,)) + step
        checkpointer.save(step, {"a": shard(comm, array), "b": array[:5].copy(), "c": [array[:2].copy()]})

    with Checkpointer(root, comm, keep=None) as checkpointer:
        for step in range(1, 6):
            save(checkpointer, step)
            gc.collect()
            scratch = [np.full(N // comm.size + 1, np.nan) for _ in range(4)]  # takes the memory that was freed
            del scratch
        checkpointer.wait_until_finished()
        for step in range(1, 6):
            target = {"a": shard(comm, poisoned((N,), "<f8")), "b": poisoned((5,), "<f8"), "c": None}
            checkpointer.restore(target, step)
            assert same_bits(target["a"].array, shard(comm, counting((N,)) + step).array), step
            assert target["b"].tolist() == [step, step + 1, step + 2, step + 3, step + 4]
            assert target["c"][0].tolist() == [step, step + 1]


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_fifty_saves_back_to_back_between_the_application_s_own_collectives_are_whole_and_unmixed(comm, shared_path):
    root = shared_path / "c"
    array, total = np.zeros(shard(comm, counting((57,))).array.shape), np.zeros(1)
    start, _ = shard_range(57, comm.size, comm.rank)
    with Checkpointer(root, comm, keep=None) as checkpointer:
        for step in range(50):
            array[:] = step
            comm.Allreduce(np.ones(1), total)
            checkpointer.save(step, {"a": Shard(array, start, 57), "n": step}, meta={"n": step})
            comm.Barrier()
            array[:] = -1
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == list(range(50))
        for step in (0, 1, 25, 48, 49):
            target = {"a": Shard(array, start, 57), "n": None}
            assert checkpointer.restore(target, step).meta == {"n": step}
            assert set(array.tolist()) == {float(step)}
            assert target["n"] == step


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_sizes_dtypes_and_keys_may_change_from_save_to_save(comm, shared_path):
    """The buffers are kept from save to save; none of them may show in another step."""
    shapes: list[tuple[int, ...]] = [(1000,), (10,), (0,), (1000, 3), (57, 2), (57, 2), (114,), (1,)]
    dtypes = ["<f8", "<f4", "<f8", "<c8", "<i2", "<u2", "u1", "?"]
    plan = list(enumerate(zip(shapes, dtypes, strict=True), start=1))

    def rows(array: np.ndarray) -> Shard:
        start, stop = shard_range(len(array), comm.size, comm.rank)
        return Shard(array[start:stop], (start, *[0] * (array.ndim - 1)), array.shape)

    with Checkpointer(shared_path / "c", comm, keep=None) as checkpointer:
        for step, (shape, dtype) in plan:
            checkpointer.save(
                step, {"a": rows(bits(shape, dtype, step)), f"only {step}": bits(shape, dtype, step + 50)}
            )
        for step, (shape, dtype) in plan:
            target = {"a": rows(poisoned(shape, dtype)), f"only {step}": poisoned(shape, dtype)}
            checkpointer.restore(target, step)
            assert same_bits(target["a"].array, rows(bits(shape, dtype, step)).array), step
            assert same_bits(target[f"only {step}"], bits(shape, dtype, step + 50)), step


def test_a_block_of_an_unchanged_size_is_copied_into_the_memory_of_the_last_save():
    buffers = Buffers()
    first = buffers.copy("a", 0, np.arange(1000.0))
    second = buffers.copy("a", 0, np.arange(1000.0)[::-1])
    other = buffers.copy("a", 1, np.arange(1000.0))
    assert np.shares_memory(first, second)
    assert not np.shares_memory(first, other)
    assert second.tolist() == list(range(999, -1, -1))
    assert first.ctypes.data % 4096 == 0, "direct I/O wants whole pages"


@pytest.mark.mpi(ranks=[2], timeout=60, unit="s")
def test_steps_go_on_while_a_save_is_in_flight_and_the_next_save_waits_for_it(comm, shared_path):
    release = threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "commit" and event["step"] == 1:
            release.wait(50)  # in the thread that commits: the save is not over before this returns

    with Checkpointer(shared_path / "c", comm, every="10steps", on_event=on_event) as checkpointer:
        checkpointer.save(1, {"n": 1})
        for step in range(2, 10):
            assert not checkpointer.save_if_due(step, {"n": step})
        assert not release.is_set()
        timer = threading.Timer(0.3, release.set)
        timer.start()
        assert checkpointer.save_if_due(10, {"n": 10})
        assert release.is_set(), "two saves in flight"
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 10]


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_save_commits_without_any_later_call_and_though_an_observer_fails(comm, shared_path, caplog):
    root = shared_path / "c"

    def on_event(event: dict[str, Any]) -> None:
        if comm.rank == 1:
            raise OSError(f"no room for {event['event']}")

    with Checkpointer(root, comm, on_event=on_event, timeout=50) as checkpointer:
        checkpointer.save(1, {"a": shard(comm, counting((N,)))})
        deadline = time.monotonic() + 50
        while not (step_dir(root, 1) / "manifest.json").exists():
            assert time.monotonic() < deadline, "not committed"
            time.sleep(0.01)
        assert manifest_of(root, 1)["world_size"] == comm.size
        checkpointer.save(2, {})
        checkpointer.close()
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert sorted(logged) == sorted(["no room for checkpoint", "no room for commit"] * 2 * (comm.rank == 1))


@pytest.mark.mpi(ranks=[3], timeout=60, unit="s")
def test_a_failure_in_the_background_is_raised_once_at_the_next_call_and_leaves_nothing_behind(comm, shared_path):
    """A directory in the place of rank 1's file: the rename fails on one rank only, after `save` has returned."""
    root: Path = shared_path / "c"
    state = {"a": shard(comm, counting((57,)))}

    def obstruct(step: int) -> Path:
        obstacle = step_dir(root, step) / "rank00001.h5"
        if comm.rank == 1:
            obstacle.mkdir(parents=True)
            (obstacle / "foreign").touch()
        comm.Barrier()
        return obstacle

    with Checkpointer(root, comm, every="1steps", keep=None) as checkpointer:
        checkpointer.save(1, state)
        for step, call in (
            (2, checkpointer.wait_until_finished),
            (3, lambda: checkpointer.save(10, state)),
            (4, lambda: checkpointer.restore(state)),
            (5, lambda: checkpointer.discard_after(0)),
        ):
            checkpointer.wait_until_finished()
            obstacle = obstruct(step)
            checkpointer.save(step, state)
            error = raised(comm, SaveFailed, call)
            assert error.rank == 1
            assert str(obstacle) in str(error)
            checkpointer.wait_until_finished()  # raised once
            assert checkpointer.all_steps() == [1], step
            comm.Barrier()
            assert [path.name for path in step_dir(root, step).iterdir()] == ["rank00001.h5"], "files of a failed save"
        checkpointer.save(6, state)
        checkpointer.wait_until_finished()
        assert checkpointer.all_steps() == [1, 6], "a failed save does not stop the next one"
    obstruct(7)
    checkpointer = Checkpointer(root, comm)
    checkpointer.save(7, state)
    raised(comm, SaveFailed, checkpointer.close)
    obstruct(8)
    with pytest.raises(SaveFailed), Checkpointer(root, comm) as checkpointer:
        checkpointer.save(8, state)
    with Checkpointer(root, comm) as checkpointer:  # the lock was let go
        assert checkpointer.latest_step() == 6
