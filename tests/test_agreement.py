"""One rank's failure is every rank's failure: the same error everywhere, in bounded time, and nobody left behind."""

from __future__ import annotations

import errno
import itertools
import threading
import time

import numpy as np
import pytest

from mpi_ckpt.comm import agreement
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, MissingShard, RankSilent, SaveFailed
from tests.ranks import await_notes, error_of, notes_in

mpi = pytest.mark.mpi(ranks=[3], timeout=60, unit="s")


def thrower(error: BaseException):
    def throw(*_):
        raise error

    return throw


@mpi
def test_results_come_in_rank_order_and_the_outcome_goes_to_all(comm):
    council = Council(comm)
    assert council.agree(lambda: comm.rank**2, lambda found: [found, "outcome"]) == [
        [rank**2 for rank in range(comm.size)],
        "outcome",
    ]
    assert council.share(lambda: comm.rank) == 0
    assert council.everywhere(lambda: comm.rank) == comm.rank
    assert council.broadcast(comm.rank) == 0
    council.close()


@mpi
def test_an_error_of_one_rank_s_work_comes_out_on_all_and_names_rank_path_and_errno(comm):
    council = Council(comm)
    decided = []
    for rank, code in itertools.product(range(comm.size), (errno.ENOSPC, errno.EACCES, errno.EIO)):

        def work(rank=rank, code=code):
            if comm.rank == rank:
                raise OSError(code, "refused", "/some/path")

        error = error_of(comm, SaveFailed, lambda: council.agree(work, decided.append, otherwise=SaveFailed))
        assert (error.rank, error.path) == (rank, "/some/path")
        assert f"[Errno {code}]" in str(error)
    assert not decided, "there was a decision without all votes"


@mpi
def test_the_engine_s_own_errors_come_out_as_themselves_and_of_several_the_lowest_rank_s(comm):
    council = Council(comm)
    mine = MissingShard("gone", path="x.h5", rank=7, found="nothing", expected="a file", action="Look for it.")
    error = error_of(comm, MissingShard, lambda: council.agree(thrower(mine) if comm.rank == 1 else str, len))
    assert str(error) == str(mine)
    work = thrower(ValueError(f"of rank {comm.rank}")) if comm.rank else str
    error = error_of(comm, CheckpointError, lambda: council.agree(work, len))
    assert error.rank == 1
    assert "of rank 1" in str(error)
    assert "2 ranks failed: 1, 2" in str(error)
    # Errors of the decision, on rank 0, are no different.
    decide = thrower(OSError(5, "bad", "m"))
    error = error_of(comm, SaveFailed, lambda: council.agree(str, decide, otherwise=SaveFailed))
    assert (error.rank, error.path) == (0, "m")
    assert type(error_of(comm, MissingShard, lambda: council.share(thrower(MissingShard("gone"))))) is MissingShard


@mpi
def test_an_interrupted_rank_votes_no_and_an_interrupted_decision_is_unknown(comm):
    council = Council(comm, timeout=50)
    for rank, kind in itertools.product(range(comm.size), (KeyboardInterrupt, SystemExit, GeneratorExit)):
        work = thrower(kind()) if comm.rank == rank else str
        error = error_of(comm, SaveFailed, lambda work=work: council.agree(work, len, otherwise=SaveFailed))
        assert error.rank == rank
        assert kind.__name__ in str(error)
    for kind in (KeyboardInterrupt, SystemExit):
        assert error_of(comm, RankSilent, lambda: council.share(thrower(kind()), otherwise=SaveFailed)).rank == 0  # noqa: B023
    assert council.share(lambda: "on we go") == "on we go"


class Stubborn(Exception):
    """Holds what no pickle can, and does not like to be printed."""

    def __init__(self, printable: bool) -> None:
        super().__init__("stubborn")
        self.lock = threading.Lock()
        self.printable = printable

    def __str__(self) -> str:
        if not self.printable:
            raise RuntimeError("no words")
        return "printable"


@mpi
def test_an_error_that_cannot_travel_is_told_all_the_same(comm):
    class Homely(MissingShard):
        """A class that other processes do not know."""

    council = Council(comm, timeout=50)
    for rank, mine in itertools.product(range(comm.size), (Stubborn(True), Stubborn(False), Homely("here", path="p"))):
        work = thrower(mine) if comm.rank == rank else str
        error = error_of(comm, CheckpointError, lambda work=work: council.agree(work, len))
        assert error.rank == rank
        assert type(mine).__name__ in str(error) or isinstance(error, MissingShard)
    assert error_of(comm, CheckpointError, lambda: council.share(thrower(Stubborn(True)))).rank == 0


@mpi
def test_a_silent_rank_is_named_and_takes_part_again_when_it_wakes_up(comm, shared_path):
    council = Council(comm, timeout=1.0)
    decided = []
    for silent in (1, 2):
        notes = notes_in(shared_path / str(silent))
        processor = time.process_time()
        work = (lambda notes=notes: await_notes(notes, 2)) if comm.rank == silent else str  # until both have failed
        with pytest.raises(SaveFailed, match=f"no word from rank {silent}.*silence for 1 s") as caught:
            council.agree(work, decided.append, otherwise=SaveFailed)
        assert caught.value.rank == silent
        (notes / str(comm.rank)).touch()
        assert time.process_time() - processor < 0.4, "who waits leaves the processor to the one that works"
        comm.Barrier()
        for number in range(5):
            assert council.agree(lambda number=number: (comm.rank, number), list) == [(r, number) for r in range(3)]
    assert not decided


@mpi
def test_when_rank_0_is_silent_the_others_do_not_know_and_go_on_with_it_later(comm, shared_path):
    council, notes = Council(comm, timeout=0.6), notes_in(shared_path / "notes")
    began = time.monotonic()
    mine = bytes([comm.rank]) * 3_000_000  # too long to be sent before it is wanted
    if comm.rank == 0:
        votes = council.agree(lambda: await_notes(notes, 2) or mine, list)
        assert [(len(vote), set(vote)) for vote in votes] == [(3_000_000, {rank}) for rank in range(3)]
    else:
        with pytest.raises(RankSilent, match="no word from rank 0"):
            council.agree(lambda: mine, list)
        assert time.monotonic() - began > 1.0, "rank 0 itself waits for the votes before it can say anything"
        (notes / str(comm.rank)).touch()
        del mine
        assert len([bytes([255]) * 3_000_000 for _ in range(20)]) == 20  # on what was given up too early
    comm.Barrier()
    for number in range(5):
        assert council.share(lambda number=number: number) == number


@mpi
def test_words_that_came_too_late_are_not_taken_for_later_ones(comm, shared_path, monkeypatch):
    monkeypatch.setattr(agreement, "_TAGS", 2)  # tags come round after two agreements instead of 16384
    council = Council(comm, timeout=0.6)
    early, late = notes_in(shared_path / "early"), notes_in(shared_path / "late")
    with pytest.raises(CheckpointError, match="no word from rank 1"):
        council.agree((lambda: await_notes(early, 2)) if comm.rank == 1 else str, len)
    (early / str(comm.rank)).touch()
    comm.Barrier()
    council.timeout = 50.0
    for number in range(6):
        # Rank 1 is slow: whoever took its old vote would not wait for this one.
        found = council.agree(lambda number=number: time.sleep(0.05 * (comm.rank == 1)) or number, list)
        assert found == [number] * comm.size
    council.timeout = 0.4
    if comm.rank == 0:
        council.share(lambda: await_notes(late, 2))
    else:
        with pytest.raises(RankSilent):
            council.share(str)
        (late / str(comm.rank)).touch()
    comm.Barrier()
    council.timeout = 50.0
    for number in range(6):
        assert council.share(lambda number=number: time.sleep(0.05) or number) == number


@mpi
def test_agreements_meet_no_messages_of_the_application(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    requests = [comm.isend(("mine", tag), dest=right, tag=tag) for tag in range(12)]
    first, second = Council(comm), Council(comm)  # two activities, each in an order of its own
    other = threading.Thread(target=lambda: [second.agree(lambda: "b", list) for _ in range(50)])
    other.start()
    for _ in range(50):
        assert first.agree(lambda: "a", list) == ["a"] * comm.size
        assert comm.allreduce(1) == comm.size
    other.join()
    assert [comm.recv(source=left, tag=tag) for tag in range(12)] == [("mine", tag) for tag in range(12)]
    for request in requests:
        request.wait()


@pytest.mark.mpi(ranks=[4], timeout=60, unit="s")
def test_any_communicator_will_do(comm, shared_path):
    from mpi_ckpt import Checkpointer, Shard

    colour = comm.rank % 2
    communicators = {
        "reversed": comm.Split(0, key=-comm.rank),
        "cartesian": comm.Create_cart([2, 2], periods=[True, False], reorder=True),
        f"part{colour}": comm.Split(colour, key=-comm.rank),  # two at the same time, in two directories
        "duplicate": comm.Dup(),
    }
    for name, part in communicators.items():
        council = Council(part)
        assert council.agree(lambda: comm.rank, list) == part.allgather(comm.rank)
        with pytest.raises(CheckpointError) as caught:
            council.agree(thrower(OSError("bad")) if council.rank == council.size - 1 else str, len)
        assert caught.value.rank == part.size - 1, "a rank is one of the communicator that was passed in"
        shape = (part.size * 3, 5)
        rows = np.arange(15.0).reshape(3, 5) + 100 * part.rank
        with Checkpointer(shared_path / name, part) as ckpt:
            ckpt.save(1, {"u": Shard(rows, (3 * part.rank, 0), shape), "name": name})
            ckpt.wait_until_finished()
            state = {"u": Shard(np.zeros((3, 5)), (3 * part.rank, 0), shape), "name": ""}
            assert ckpt.restore(state).step == 1
        assert state["name"] == name
        np.testing.assert_array_equal(state["u"].array, rows)
