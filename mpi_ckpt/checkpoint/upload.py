"""The second tier: every committed step goes on to a remote store, beside the training and without holding it up.

    choose    rank 0: the oldest step that waits                                                     then all know
    claim     rank 0: the application agrees, and the place is this launch's, or still is            else nothing goes
    send      every rank: its own shard, unless it is there already, in parts and constant memory
    vote      every rank reports, or its error                                   any error: a pause, and once more
    commit    rank 0, holding all reports: is the lock still ours, and the step still this save? are all shards there?
              then upload_manifest.json, read back
    learn     every rank hears the outcome; only now may retention delete the local copy, or older remote ones

It is an activity of its own: one thread and one council, whose agreements come in the same order on all ranks, because
each commit wakes every rank's thread once. A failed upload fails nothing else: it is an event and a line in the log,
the step waits for the next commit, or the next launch, and what has arrived is not sent again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpi_ckpt.checkpoint import remote, steps
from mpi_ckpt.checkpoint.background import Background
from mpi_ckpt.checkpoint.events import Event
from mpi_ckpt.checkpoint.transfer import Transfer
from mpi_ckpt.checkpoint.upload_queue import UploadQueue
from mpi_ckpt.comm.agreement import Council
from mpi_ckpt.errors import CheckpointError, RankSilent, RemoteFailed
from mpi_ckpt.storage import lock, names
from mpi_ckpt.storage.manifest import read_manifest
from mpi_ckpt.storage.object_store import ObjectStore, open_store
from mpi_ckpt.storage.remote_claim import Claim
from mpi_ckpt.storage.remote_steps import write_upload_manifest
from mpi_ckpt.storage.shard_stream import send_shards

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_PAUSES = (1.0, 5.0)  # seconds before another attempt at a step; the client has tried each request several times
_SLOW_NETWORK = 1e6  # bytes a second that even a bad day's network reaches: stretches the timeout
_EXIT_PATIENCE = 10.0  # seconds until all ranks have heard that there is no time any more


class _Task(NamedTuple):
    """What rank 0 says is next; a `step` of None: nothing now, or with `end` nothing ever."""

    step: int | None
    nbytes: int = 0
    given_up: tuple[int, ...] = ()
    end: bool = False


class Upload:
    """Uploads the steps below `root` that it is told of, and those that an earlier launch left behind."""

    def __init__(self, root: Path, comm: MPI.Comm, options: remote.RemoteOptions, council_timeout: float) -> None:
        """**Collective.** Raises RemoteRefused, the same on every rank, for what only the user can change."""
        self._root = root
        self._options = options
        self._council = Council(comm, council_timeout)
        self._council.agree(lambda: remote.check_threads(options.url), lambda _: remote.check(options.url))
        self._queue = UploadQueue(options.local.keep)
        self._publishing = threading.Lock()  # rank 0: not while steps are discarded
        self._before = options.before_upload  # rank 0: None once it has returned
        self._wake = threading.Semaphore(0)
        self._idle, self._closing = threading.Event(), threading.Event()
        self._idle.set()
        self._transfer = Transfer(options.bandwidth, options.nice)
        self._background = Background("mpi_ckpt upload", options.nice)
        self._launch_id, self._claim = "", Claim("")
        self._on_event: Callable[[Event], None] = lambda event: None
        self._scanned = False
        self._seen = remote.Seen()  # rank 0's

    def start(self, launch_id: str, on_event: Callable[[Event], None]) -> None:
        """**Local.** Begin with what an earlier launch left; all ranks do. `launch_id` holds the writer's lock."""
        self._launch_id, self._claim, self._on_event = launch_id, Claim(launch_id), on_event
        self._wake.release()
        self._background.start(self._run)

    def waiting(self) -> frozenset[int]:
        """**Local.** On rank 0: the steps that are not uploaded yet and whose local copy is needed for it."""
        return self._queue.steps

    def add(self, step: int) -> None:
        """**Local.** A step has been committed; all ranks say so, in the same order."""
        if self._council.rank == 0:
            self._queue.add(step)
        self._wake.release()

    @contextlib.contextmanager
    def discarding_after(self, step: int) -> Iterator[None]:
        """**Local.** On rank 0, around deleting the local steps after `step`: the remote ones are gone before, and none
        of them is committed there again. Raises RemoteFailed, and what `before_upload` does."""
        with self._publishing:
            store = open_store(self._options.url)
            self._hold(store)  # a successor's steps are not this launch's to delete
            remote.discard_after(store, step, lambda: self._hold(store))
            self._queue.forget_after(step)  # not before: where that failed the steps stay, and have to go up
            yield

    def abandon(self) -> None:
        """**Local.** Stop as soon as possible; whatever has arrived stays."""
        self._transfer.stop()
        self._idle.wait(_EXIT_PATIENCE)

    def close(self, timeout: float) -> None:
        """**Collective.** Upload what waits, for at most `timeout` seconds; raises nothing that an upload raised."""
        self._closing.set()
        self._wake.release()
        if not self._background.wait(timeout):
            self._transfer.stop()
        if not self._background.wait(_EXIT_PATIENCE):
            logger.warning("leaving with an upload under way; the next launch will see to it")
            return
        self._background.collect()
        if self._council.rank == 0 and (left := self._queue.steps):
            logger.warning("not uploaded yet: steps %s; the next launch goes on", ", ".join(map(str, sorted(left))))
        self._council.close()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """**Collective.** A round for each time that all ranks were woken."""
        number, ended = 0, False
        while not ended:
            self._wake.acquire()
            self._idle.clear()
            number += 1
            self._council.start_series(number)
            try:
                ended = self._round()
            except CheckpointError as error:
                self._say("uploads go on after the next save: %s", error)
            finally:
                self._idle.set()

    def _round(self) -> bool:
        """**Collective.** Everything that waits, once; whether this was the last round."""
        failed: set[int] = set()
        while True:
            task = self._council.share(lambda: self._choose(frozenset(failed)))
            for step in task.given_up:
                self._say("step %d is not uploaded: newer ones wait", step)
                self._on_event({"event": "upload_given_up", "step": step})
            if task.step is None:
                return task.end
            if not self._upload(task.step, task.nbytes):
                failed.add(task.step)

    def _choose(self, failed: frozenset[int]) -> _Task:
        """Rank 0: what is next."""
        if self._transfer.stopped:
            return _Task(None, end=True)
        if not self._scanned:
            try:
                self._transfer.run(self._scan)
            except RemoteFailed as error:
                logger.warning("cannot see what is uploaded already, trying again at the next save: %s", error)
        given_up = tuple(self._queue.take_given_up())
        self._seen.leftovers.update(given_up)
        step = self._queue.take(failed)
        if step is None:
            return _Task(None, given_up=given_up, end=self._closing.is_set())
        manifest = remote.local_manifest(self._root, step)
        return _Task(step, sum(shard.nbytes for shard in manifest.shards) if manifest else 0, given_up)

    def _scan(self) -> None:
        """Rank 0: what earlier launches left behind, here to be uploaded and there to be cleaned."""
        store, policy = open_store(self._options.url), self._options.policy
        self._queue.add_before(*remote.look(store, self._root, policy, self._seen))
        self._scanned = True

    def _prepare(self) -> None:
        """Rank 0, before anything is sent: the place is this launch's, and what it holds is known."""
        if not self._scanned:
            self._scan()
        with self._publishing:
            self._hold(open_store(self._options.url))

    def _hold(self, store: ObjectStore) -> None:
        """Rank 0, before anything is changed there: this launch may, and it has the place."""
        lock.check_owner(self._root, self._launch_id)  # else the claim would be taken from the successor
        if self._before is not None:
            self._before(store)
            self._before = None
        self._claim.hold(store)

    def _upload(self, step: int, nbytes: int) -> bool:
        """**Collective.** Upload a step, in several attempts; whether it is done with."""
        began, error = time.monotonic(), None
        for pause in (0.0, *_PAUSES):
            self._transfer.pause(pause)
            try:
                sent = self._attempt(step, nbytes)
            except RankSilent:
                self._queue.put_back()
                raise
            except CheckpointError as failure:
                error = failure
                wanted, in_time = self._council.share(lambda: self._judge(step))
                if not wanted:
                    self._queue.done()
                    return True
                self._say("uploading step %d: %s", step, error)
                if not in_time:
                    break
            else:
                seconds = time.monotonic() - began
                about = {"nbytes": nbytes, "sent_nbytes": sent, "upload_seconds": seconds}
                self._on_event({"event": "upload", "step": step, **about})
                self._queue.done()  # only now may retention have the local copy
                return True
        self._queue.put_back()
        self._on_event({"event": "upload_failed", "step": step, "error": str(error)})
        return False

    def _judge(self, step: int) -> tuple[bool, bool]:
        """Rank 0: whether the step still has to go, and whether there is time for another attempt."""
        wanted = steps.is_committed(names.step_dir(self._root, step))
        if not wanted:
            self._seen.leftovers.add(step)
        return wanted, not self._transfer.stopped

    def _say(self, text: str, *args: object) -> None:
        """A warning, once for all ranks."""
        if self._council.rank == 0:
            logger.warning(text, *args)

    def _attempt(self, step: int, nbytes: int) -> int:
        """**Collective.** Claim, send, vote and commit; the bytes that all ranks have sent."""
        self._council.share(lambda: self._transfer.run(self._prepare), otherwise=RemoteFailed)
        slowest = min(_SLOW_NETWORK, self._options.bandwidth or _SLOW_NETWORK)
        return self._council.agree(
            lambda: self._transfer.run(lambda: self._send(step)),
            lambda votes: self._transfer.run(lambda: self._commit(step, votes)),
            otherwise=RemoteFailed,
            extra_time=nbytes / slowest,
        )

    def _send(self, step: int) -> tuple[str, int]:
        """This rank's shards; the save that they are of, and the bytes that had to go."""
        directory = names.step_dir(self._root, step)
        manifest = read_manifest(directory)
        # A step that more or fewer ranks have saved, in an earlier launch, has other shards than one a rank.
        mine = slice(self._council.rank, None, self._council.size)
        sent = send_shards(open_store(self._options.url), directory, manifest, mine, self._transfer.pace)
        return manifest.save_id, sent

    def _commit(self, step: int, votes: list[tuple[str, int]]) -> int:
        """Rank 0, after every rank voted yes."""
        store = open_store(self._options.url)
        with self._publishing:
            manifest = remote.local_manifest(self._root, step)
            if manifest is None or {manifest.save_id} != {save_id for save_id, _ in votes}:
                raise RemoteFailed("the step was replaced while it was uploaded", path=names.step_dir(self._root, step))
            write_upload_manifest(store, manifest, lambda: self._hold(store))
        try:
            remote.tidy(store, self._root, manifest, self._options.policy, self._seen, lambda: self._hold(store))
        except CheckpointError as error:
            logger.warning("cannot delete from the remote tier, going on: %s", error)
        return sum(sent for _, sent in votes)
