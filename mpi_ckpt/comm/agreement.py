"""One rank's failure is every rank's failure: work that can raise, and what all ranks then agree on.

Every step of a protocol has the same shape: each rank does its part, rank 0 decides on what they report, all learn the
outcome. `Council.agree` is that shape, once. Three properties make it fit for work on disks:

- No rank can leave early. An exception on one rank is a vote, not an escape; the same error comes out on all of them.
- Waiting ranks sleep. A rank that spins in a barrier takes the core from the one that still writes.
- Silence has a name. Votes are point-to-point messages to rank 0, so that a timeout can tell which ranks are missing.

The cost is one small message to and from rank 0 a rank: linear in the number of ranks, microseconds each.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mpi_ckpt.errors import CheckpointError, ExplainedError, RankSilent, from_os_error

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_TIMEOUT = 1800.0  # seconds that a rank may be silent
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 1e-3  # seconds between polls: each is twice as long as the one before
_LOOKS = 4  # in a row, for MPI may let a message in during one look and show it at the next
_TAGS = 8192  # agreements before a tag comes round again: two each for votes and outcomes, two for other messages.
_FREE_TAGS = 2 * _TAGS  # the first of those; MPI guarantees tags up to 32767


@dataclass(frozen=True)
class _Failure:
    """A vote of no, or the outcome that follows from one."""

    error: ExplainedError


class Council:
    """The ranks of one communicator, agreeing on one thing after another.

    It owns a duplicate of `comm`, so that its messages meet no others; an activity that runs in a thread of its own
    needs a council of its own. All ranks must call `agree` in the same order.
    """

    def __init__(self, comm: MPI.Comm, timeout: float = DEFAULT_TIMEOUT) -> None:
        """**Collective.** `timeout` is in seconds."""
        self.comm = comm.Dup()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.timeout = timeout
        self._series = self._agreements = 0
        self._unsent: list[MPI.Request] = []  # they own the bytes that a silent rank may still fetch

    def start_series(self, series: int) -> None:
        """**Local.** Begin to count agreements anew; all ranks give the same number, another one each time.

        Ranks that left the last series at different agreements, because rank 0 was silent, are in step again.
        """
        self._series, self._agreements = series, 0

    @property
    def free_tag(self) -> int:
        """**Local.** For messages on `comm` that `work` itself exchanges with other ranks: the next agreement's own.

        What an exchange that failed has left under way is not taken for that of the next 127 series.
        """
        return _FREE_TAGS + (128 * self._series + self._agreements) % (2 * _TAGS)

    def close(self) -> None:
        """**Collective.** Free the duplicated communicator."""
        self.comm.Free()

    def agree(
        self,
        work: Callable[[], T],
        decide: Callable[[list[T]], R],
        *,
        otherwise: type[CheckpointError] = CheckpointError,
        extra_time: float = 0.0,
    ) -> R:
        """**Collective.** Run `work()` on every rank, then `decide(results)` on rank 0, and return its outcome on all.

        `results` is in rank order. Results and outcome must be small and picklable. When `work` raises on any rank, or
        `decide` on rank 0, every rank raises the same error: the one of the lowest rank that failed, with the others'
        ranks in its text. Exceptions that are no ExplainedError (OSError, say) become `otherwise`. A rank silent
        for `timeout + extra_time` seconds after rank 0 is done with its own part fails the agreement too, by name.
        RankSilent means that nobody knows what rank 0 decided: it does not answer, or was interrupted in `decide`.
        """
        vote: Any
        cause: BaseException | None = None
        try:
            vote = work()
        except BaseException as error:  # a Ctrl-C or a SystemExit is a vote too: nobody may be left waiting
            cause, vote = error, _Failure(_explained(error, self.rank, otherwise))
            vote.error.rank = self.rank if vote.error.rank is None else vote.error.rank
        outcome = self._lead(vote, decide, otherwise, extra_time) if self.rank == 0 else self._follow(vote, extra_time)
        if isinstance(outcome, _Failure):
            raise outcome.error from cause
        return outcome

    def share(self, work: Callable[[], R], *, otherwise: type[CheckpointError] = CheckpointError) -> R:
        """**Collective.** Run `work()` on rank 0 alone; every rank returns its result or raises its error."""
        return self.agree(lambda: None, lambda _: work(), otherwise=otherwise)

    def everywhere(self, work: Callable[[], T], *, otherwise: type[CheckpointError] = CheckpointError) -> T:
        """**Collective.** Run `work()` on every rank; each returns its own result once all have succeeded."""
        mine: list[T] = []
        self.agree(lambda: mine.append(work()), lambda _: None, otherwise=otherwise)
        return mine[0]

    def broadcast(self, value: T) -> T:
        """**Collective.** Rank 0's `value` on every rank: a decision in the middle of computing, so nobody sleeps."""
        return self.comm.bcast(value)

    # -- messages ----------------------------------------------------------------------------------------------------
    # Each carries the number of its agreement. What was sent to a rank that had given up stays in MPI's queue, and must
    # not be taken for an answer when its tag comes round again.

    def _begin(self) -> tuple[tuple[int, int], int, int]:
        """The number of the next agreement, and the tags of its votes and of its outcome."""
        self._unsent = [request for request in self._unsent if not request.test()[0]]
        number = self._series, self._agreements
        tag = 2 * (self._agreements % _TAGS)
        self._agreements += 1
        return number, tag, tag + 1

    def _lead(
        self, vote: Any, decide: Callable[[list[Any]], Any], otherwise: type[CheckpointError], extra_time: float
    ) -> Any:
        number, vote_tag, outcome_tag = self._begin()
        votes: dict[int, Any] = {0: vote}
        deadline = time.monotonic() + self.timeout + extra_time

        def complete() -> bool:
            while message := self.comm.improbe(tag=vote_tag):  # from any rank
                sender, of, value = message.recv()
                if of == number:
                    votes[sender] = value
            return len(votes) == self.size

        outcome: Any
        if _poll(complete, deadline):
            outcome = _decide([votes[r] for r in range(self.size)], decide, otherwise)
        else:
            outcome = _Failure(_silence([r for r in range(self.size) if r not in votes], self.timeout, otherwise))
        requests = [self.comm.isend((number, outcome), dest=r, tag=outcome_tag) for r in range(1, self.size)]
        heard = [request for r, request in enumerate(requests, start=1) if r in votes]
        _poll(lambda: all([request.test()[0] for request in heard]), deadline + self.timeout)
        self._unsent += requests
        return outcome

    def _follow(self, vote: Any, extra_time: float) -> Any:
        number, vote_tag, outcome_tag = self._begin()
        self._unsent.append(self.comm.isend((self.rank, number, vote), dest=0, tag=vote_tag))

        def outcome() -> tuple[Any] | None:
            message = self.comm.improbe(source=0, tag=outcome_tag)
            of, value = message.recv() if message else (None, None)
            return (value,) if of == number else None

        # Rank 0 waits one timeout for the last vote and may use another for its decision.
        found = _poll(outcome, time.monotonic() + 2 * self.timeout + extra_time)
        return found[0] if found else _Failure(_silence([0], 2 * self.timeout, RankSilent))


def _decide(votes: Sequence[Any], decide: Callable[[list[Any]], Any], otherwise: type[CheckpointError]) -> Any:
    failures = {rank: vote.error for rank, vote in enumerate(votes) if isinstance(vote, _Failure)}
    if failures:
        return _Failure(_first_of(failures))
    try:
        return decide(list(votes))
    except Exception as error:
        return _Failure(_explained(error, 0, otherwise))
    except BaseException:
        return _Failure(
            RankSilent("rank 0 was interrupted while it decided; whether that took effect is unknown", rank=0)
        )


def _first_of(failures: dict[int, ExplainedError]) -> ExplainedError:
    error = failures[min(failures)]
    if len(failures) > 1:
        ranks = ", ".join(str(rank) for rank in sorted(failures)[:16]) + (", ..." if len(failures) > 16 else "")
        error.what += f" [{len(failures)} ranks failed: {ranks}]"
    return error


def _explained(error: BaseException, rank: int, otherwise: type[CheckpointError]) -> ExplainedError:
    """The error as one that every rank can raise."""
    if isinstance(error, ExplainedError) and _travels(error):
        return error
    if isinstance(error, OSError):
        return from_os_error(error, otherwise, rank)
    return otherwise("".join(traceback.format_exception_only(error)).strip(), rank=rank)


def _travels(error: ExplainedError) -> bool:
    """Whether other ranks can have it: an application's own class may be one that only this process knows."""
    try:
        pickle.dumps(error)
    except Exception:
        return False
    return True


def _silence(ranks: list[int], seconds: float, otherwise: type[CheckpointError]) -> CheckpointError:
    error = otherwise(
        f"no word from rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
        rank=ranks[0],
        found=f"silence for {seconds:g} s",
        expected="a report from every rank",
        action="See whether that rank still runs and its disk answers; raise `timeout` if it is only slow.",
    )
    error.silent = tuple(ranks)
    return error


def _poll(ready: Callable[[], Any], deadline: float) -> Any:
    """The first true result of `ready`; its last one at the deadline.

    It is asked again and again, with sleeps between that grow: what takes no time costs none, and a wait for a disk
    leaves the processor to whoever writes.
    """
    pause = _FIRST_PAUSE
    while True:
        for _ in range(_LOOKS):
            result = ready()
            if result:
                return result
        if time.monotonic() >= deadline:
            return result
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
