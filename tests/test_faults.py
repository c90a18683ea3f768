"""A disk that fails on one rank fails the save on all, by name, and costs nothing that was committed before."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from errno import EACCES, EIO, ENOSPC
from pathlib import Path

import pytest

from mpi_ckpt import Checkpointer, cli
from mpi_ckpt.errors import CheckpointError, OutcomeUnknown, SaveFailed
from tests.programs.faults import Fault, watched
from tests.programs.states import blank, differences, state
from tests.ranks import await_notes, contents, error_of, notes_in, same_everywhere

mpi = pytest.mark.mpi(ranks=[3], timeout=180, unit="s")

FILE, DIRECTORY, MANIFEST = "step_*/rank*.h5.tmp", "step_????????", "step_*/manifest.json.tmp"
ON_ANY_RANK = [
    ("open", FILE, EACCES, 0),
    ("pwrite", FILE, ENOSPC, 0),
    ("pwrite", FILE, EIO, 0),
    ("ftruncate", FILE, EIO, 0),
    ("fsync", FILE, EIO, 0),
    ("close", FILE, EIO, 0),
    ("rename", "step_*/rank*.h5", EACCES, 0),
    ("fsync", DIRECTORY, EIO, 0),
]
ON_RANK_0 = [
    ("mkdir", DIRECTORY, EACCES, 0),
    ("mkdir", DIRECTORY, ENOSPC, 0),
    ("fsync", ".", EIO, 0),
    ("open", MANIFEST, EACCES, 0),
    ("write", MANIFEST, ENOSPC, 0),
    ("fsync", MANIFEST, EIO, 0),
    ("close", MANIFEST, EIO, 0),
    ("rename", "step_*/manifest.json", EACCES, 0),
    ("fsync", DIRECTORY, EIO, 1),  # the one after the manifest's rename
]


@contextlib.contextmanager
def faults_on(comm, rank: int, root, *faults: Fault):
    """These faults, on one rank; each must have struck."""
    with contextlib.ExitStack() as stack:
        for fault in faults if comm.rank == rank else ():
            stack.enter_context(watched(root, fault))
        yield
    if comm.rank == rank:
        assert all(fault.struck for fault in faults), "the fault was never met"


def mine(comm, step: int, tag: str = "x"):
    return state(comm.rank, comm.size, step, tag)


def check_restores(comm, ckpt, step: int, tag: str = "x") -> None:
    found = blank(comm.rank, comm.size)
    assert ckpt.restore(found, step).step == step
    assert (found["step"], found["tag"], differences(found, comm.rank, comm.size)) == (step, tag, [])


def check_intact(comm, root) -> None:
    """Every committed step is, and nothing else lies about."""
    comm.Barrier()
    if comm.rank == 0:
        assert cli.main(["verify", str(root)]) == 0
        assert not list(root.rglob("*.tmp"))
    comm.Barrier()


@mpi
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "again"])
def test_a_fault_on_any_rank_in_any_phase_fails_the_save_on_all_and_only_it(comm, shared_path, overwrite):
    root = shared_path / "root"
    cases = [(rank, *case) for rank in range(comm.size) for case in ON_ANY_RANK] + [(0, *case) for case in ON_RANK_0]
    with Checkpointer(root, comm, keep=None, async_io=False) as ckpt:
        ckpt.save(1, mine(comm, 1))
        for number, (rank, call, pattern, code, skip) in enumerate(cases, start=2):
            step = 1 if overwrite else number
            before = contents(root)
            comm.Barrier()
            with faults_on(comm, rank, root, Fault(call, pattern, code, skip=skip)):
                error = error_of(
                    comm, SaveFailed, lambda step=step: ckpt.save(step, mine(comm, step, "bad"), overwrite=overwrite)
                )
            assert type(error) is SaveFailed
            assert error.rank == rank
            assert f"[Errno {code}]" in str(error)
            assert str(root) in error.path
            comm.Barrier()
            assert contents(root) == before, f"{call} {pattern} on rank {rank}"
            comm.Barrier()
            ckpt.save(step, mine(comm, step, f"good {number}"), overwrite=overwrite)
            check_restores(comm, ckpt, step, f"good {number}")
        assert ckpt.all_steps() == [1] if overwrite else list(range(1, len(cases) + 2))
        check_intact(comm, root)


@mpi
def test_when_the_manifest_cannot_be_taken_back_the_outcome_is_unknown_and_every_file_stays(comm, shared_path):
    def durable() -> Fault:
        """The fsync after the manifest's rename fails."""
        return Fault("fsync", DIRECTORY, EIO, skip=1)

    cases = {  # and so does what takes it back
        "unlink": (False, [durable(), Fault("unlink", "*/manifest.json", EIO)]),
        "fsync": (False, [Fault("fsync", DIRECTORY, EIO, skip=1, times=2)]),
        "open": (True, [durable(), Fault("open", MANIFEST, EACCES, skip=1)]),
        "rename": (True, [durable(), Fault("rename", "*/manifest.json", EIO, skip=1)]),
    }
    for name, (overwrite, faults) in cases.items():
        root = shared_path / name
        with Checkpointer(root, comm, keep=None, async_io=False) as ckpt:
            for step in (1, 2) if overwrite else (1,):
                ckpt.save(step, mine(comm, step, "old"))
            with faults_on(comm, 0, root, *faults):
                error = error_of(
                    comm,
                    OutcomeUnknown,
                    lambda overwrite=overwrite, ckpt=ckpt: ckpt.save(2, mine(comm, 2, "new"), overwrite=overwrite),
                )
            assert isinstance(error, SaveFailed)
            assert "outcome unknown" in str(error)
            assert f"[Errno {EIO}]" in str(error)
            files = {path.name for path in (root / "step_00000002").iterdir()}
            assert len([file for file in files if file.endswith(".h5")]) == (6 if overwrite else 3)
            assert "manifest.json" in files
            comm.Barrier()
            check_restores(comm, ckpt, 2, "new")  # it is visible, so it is whole
            check_restores(comm, ckpt, 1, "old")
            ckpt.save(2, mine(comm, 2, "again"), overwrite=True)
            check_restores(comm, ckpt, 2, "again")
            check_intact(comm, root)


@mpi
def test_the_error_of_an_asynchronous_save_is_raised_by_whatever_comes_next(comm, shared_path):
    root = shared_path / "root"

    def poll(ckpt) -> None:
        deadline = time.monotonic() + 60
        for step in range(100, 10**9):
            try:
                ckpt.save_if_due(step, {})
            finally:
                same_everywhere(comm, step)
            assert time.monotonic() < deadline

    ways = {
        "wait": lambda ckpt, step: ckpt.wait_until_finished(),
        "save": lambda ckpt, step: ckpt.save(step + 1, mine(comm, step + 1)),
        "restore": lambda ckpt, step: ckpt.restore(blank(comm.rank, comm.size)),
        "save_if_due": lambda ckpt, step: poll(ckpt),
        "close": lambda ckpt, step: ckpt.close(),
        "end of with": lambda ckpt, step: None,
    }
    for number, (name, raise_it) in enumerate(ways.items()):
        step, rank = 10 * number + 2, number % comm.size
        leaving = name in ("close", "end of with")

        def launch(step=step, raise_it=raise_it, leaving=leaving) -> None:
            with Checkpointer(root, comm, keep=2, every="1000000000steps") as ckpt:
                ckpt.save(step - 1, mine(comm, step - 1))
                ckpt.wait_until_finished()
                ckpt.save(step, mine(comm, step))
                if leaving:
                    return raise_it(ckpt, step)
                error = error_of(comm, SaveFailed, lambda: raise_it(ckpt, step))
                assert step not in ckpt.all_steps()
                check_restores(comm, ckpt, step - 1)
                ckpt.save(step, mine(comm, step, "in the end"))
                check_restores(comm, ckpt, step, "in the end")
                raise error

        with faults_on(comm, rank, root, Fault("fsync", f"step_{step:08d}/rank*.h5.tmp", EIO)):
            assert error_of(comm, SaveFailed, launch).rank == rank
        with Checkpointer(root, comm, read_only=True) as ckpt:
            assert ckpt.latest_step() == (step - 1 if leaving else step)
            assert len(ckpt.all_steps()) == (1 if leaving else 2)  # room was made for the one that failed
    check_intact(comm, root)


@mpi
def test_a_callback_that_raises_on_one_rank_stops_nobody(comm, shared_path):
    def on_event(event: dict) -> None:
        if comm.rank == 1:
            raise RuntimeError(f"no interest in {event}")

    with Checkpointer(shared_path / "root", comm, keep=2, timeout=3600, on_event=on_event) as ckpt:
        for step in range(1, 5):
            ckpt.save(step, mine(comm, step))
        check_restores(comm, ckpt, 4)
        assert ckpt.all_steps() == [3, 4]


@mpi
def test_an_interrupt_on_one_rank_while_it_writes_fails_the_save_on_all(comm, shared_path):
    class Interrupt(Fault):
        def _strike(self) -> None:
            with contextlib.suppress(OSError):
                return super()._strike()
            raise KeyboardInterrupt

    root = shared_path / "root"
    with Checkpointer(root, comm, async_io=False) as ckpt:
        for step, rank in enumerate(range(comm.size), start=1):
            with faults_on(comm, rank, root, Interrupt("fsync", FILE, EIO)):
                error = error_of(comm, SaveFailed, lambda step=step: ckpt.save(step, mine(comm, step)))
            assert error.rank == rank
            assert "KeyboardInterrupt" in str(error)
            assert step not in ckpt.all_steps()
            ckpt.save(step, mine(comm, step))
            check_restores(comm, ckpt, step)
        check_intact(comm, root)


class Hanging(Fault):
    """Does not come back, once, until there are that many `notes`; then it works."""

    def __init__(self, call: str, path: str, notes: Path, many: int) -> None:
        super().__init__(call, path, EIO)
        self.notes, self.many = notes, many

    def _strike(self) -> None:
        with contextlib.suppress(OSError):
            return super()._strike()
        return await_notes(self.notes, self.many)


def failure(ckpt: Checkpointer, step: int, saved: dict) -> CheckpointError | None:
    """What saving ended with on this rank."""
    try:
        ckpt.save(step, saved)
        ckpt.wait_until_finished()
    except CheckpointError as error:
        return error
    return None


@mpi
@pytest.mark.parametrize("async_io", [False, True], ids=["sync", "async"])
def test_a_disk_that_hangs_fails_the_save_by_name_and_the_next_save_waits_for_it(comm, shared_path, async_io):
    root = shared_path / "root"
    with Checkpointer(root, comm, keep=None, timeout=1.0, async_io=async_io) as ckpt:
        ckpt.save(1, mine(comm, 1))
        ckpt.wait_until_finished()
        for step, rank in ((2, 1), (3, 2)):
            notes = notes_in(shared_path / f"given up {step}")
            comm.Barrier()
            # The others do not wait for the disk: they fail twice before it comes back, and its file may still arrive.
            hanging = Hanging("fsync", f"step_{step:08d}/rank*.tmp", notes, many=2 * (comm.size - 1))
            with faults_on(comm, rank, root, hanging):
                error, failures = failure(ckpt, step, mine(comm, step, "late")), 0
                assert type(error) is SaveFailed
                assert error.rank == rank
                while error is not None:
                    assert f"no word from rank {rank}" in str(error)
                    failures += 1
                    comm.rank == rank or (notes / f"{comm.rank} {failures}").touch()
                    error = failure(ckpt, step, mine(comm, step, "in time"))
                assert failures >= (1 if comm.rank == rank else 2)
            check_restores(comm, ckpt, step, "in time")
        assert ckpt.all_steps() == [1, 2, 3]
    check_intact(comm, root)


@mpi
def test_when_the_disk_of_rank_0_hangs_the_others_do_not_know_the_outcome_and_the_next_save_works(comm, shared_path):
    for async_io in (False, True):
        root, notes = shared_path / f"root{async_io}", notes_in(shared_path / f"given up {async_io}")
        hanging = Hanging("fsync", "step_00000002/rank*.tmp", notes, many=comm.size - 1)
        with faults_on(comm, 0, root, hanging), Checkpointer(root, comm, timeout=1.0, async_io=async_io) as ckpt:
            assert failure(ckpt, 1, mine(comm, 1)) is None
            error = failure(ckpt, 2, mine(comm, 2))
            if comm.rank > 0:
                assert type(error) is OutcomeUnknown
                assert "outcome unknown: no word from rank 0" in str(error)
                (notes / str(comm.rank)).touch()
            comm.Barrier()
            check_restores(comm, ckpt, 2)  # rank 0 had all votes, so it did commit
            assert failure(ckpt, 3, mine(comm, 3)) is None
            check_restores(comm, ckpt, 3)
        check_intact(comm, root)


@mpi
def test_what_cannot_be_deleted_does_not_fail_a_save_and_is_no_step(comm, shared_path):
    root = shared_path / "root"
    cases = [("rmdir", "step_00000001", EACCES), ("unlink", "*/rank00001.h5", EIO), ("fsync", "step_00000001", EIO)]
    with Checkpointer(root, comm, keep=2, async_io=False) as ckpt:
        for call, pattern, code in cases:
            for step in ckpt.all_steps():
                comm.rank or shutil.rmtree(root / f"step_{step:08d}")
            comm.Barrier()
            for step in (1, 2):
                ckpt.save(step, mine(comm, step))
            with faults_on(comm, 0, root, Fault(call, pattern, code)):
                ckpt.save(3, mine(comm, 3))
            assert ckpt.all_steps() == [2, 3]
            ckpt.save(4, mine(comm, 4))
            assert not (root / "step_00000001").exists(), "the next save cleans"
        with faults_on(comm, 0, root, Fault("unlink", "step_00000003/manifest.json", EACCES)):
            ckpt.save(5, mine(comm, 5))
        for step in ckpt.all_steps():
            check_restores(comm, ckpt, step)
        check_intact(comm, root)


@mpi
def test_a_failed_save_costs_no_step_and_blocks_none(comm, shared_path):
    root = shared_path / "root"
    with Checkpointer(root, comm, keep=1) as ckpt:
        ckpt.save(10, mine(comm, 10))
        with faults_on(comm, 2, root, Fault("fsync", "step_00000020/*.tmp", ENOSPC)):
            ckpt.save(20, mine(comm, 20))
            error_of(comm, SaveFailed, ckpt.wait_until_finished)
        check_restores(comm, ckpt, 10)  # the only one: it stays until there is another
        ckpt.save(15, mine(comm, 15))  # after a rollback to 10
        check_restores(comm, ckpt, 15)
        assert ckpt.all_steps() == [15]
    check_intact(comm, root)


@mpi
def test_fifty_saves_back_to_back_amid_the_application_s_own_collectives(comm, shared_path):
    root = shared_path / "root"
    mutable = mine(comm, 0)
    with Checkpointer(root, comm, keep=None) as ckpt:
        for step in range(1, 51):
            new = mine(comm, step, f"tag {step}")
            mutable["flat"].array[...], mutable["table"][...] = new["flat"].array, new["table"]
            mutable["grid"]["field"].array[...] = new["grid"]["field"].array
            mutable["rng"].value.bit_generator.state = new["rng"].value.bit_generator.state
            mutable["own"].value[:] = new["own"].value
            mutable |= {"step": step, "tag": f"tag {step}"}
            ckpt.save(step, mutable)
            mutable["flat"].array += 1  # it is copied: what happens to the state now is nobody's business
            mutable["own"].value.append("late")
            mutable["own"].value.pop()
            assert comm.allreduce(comm.rank) == 3
            assert comm.bcast(step, root=step % 3) == step
            comm.Barrier()
        ckpt.wait_until_finished()
        assert ckpt.all_steps() == list(range(1, 51))
        for step in range(1, 51):
            check_restores(comm, ckpt, step, f"tag {step}")
    check_intact(comm, root)


@pytest.fixture
def small_disk(tmp_path):
    """A real filesystem of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True, text=True)
    if mount.returncode != 0:
        pytest.skip(f"cannot mount a small filesystem: {mount.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_fails_the_save_and_the_next_succeeds_once_there_is_room(launch, small_disk):
    launch(3, "-m", "tests.programs.full_disk", small_disk).check()
    assert cli.main(["verify", str(small_disk / "sync")]) == 0
    assert cli.main(["verify", str(small_disk / "async")]) == 0
