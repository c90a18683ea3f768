"""Ending a job: nothing that a rank has said is lost on the way to whoever reads it."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios
import threading
import time

import pytest

from mpi_ckpt.comm.abort import abort


class Ended(Exception):
    """In place of the end of the process: how many bytes nobody had read by then."""


class Communicator:
    """Of MPI: only what `abort` asks of it."""

    def Abort(self, status: int) -> None:  # noqa: N802
        raise Ended(status, *struct.unpack("i", fcntl.ioctl(sys.stderr.fileno(), termios.FIONREAD, bytes(4))))


def test_the_job_is_ended_when_the_last_words_have_been_read(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        monkeypatch.setattr(sys, "stderr", writer)
        print("last words", file=writer)

        def read() -> None:
            time.sleep(0.2)
            os.read(reader.fileno(), 100)

        thread = threading.Thread(target=read)
        thread.start()
        with pytest.raises(Ended) as ended:
            abort(Communicator(), 3)
        thread.join()
    assert ended.value.args == (3, 0)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "nobody_reads"])
def test_nobody_who_listens_does_not_keep_the_job(monkeypatch, close):
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as reader, os.fdopen(writing, "w") as writer:
        monkeypatch.setattr(sys, "stderr", writer)
        if close:
            reader.close()
        else:
            print("last words", file=writer)
        with pytest.raises(Ended) as ended:
            abort(Communicator(), 3)
    assert ended.value.args == (3, 0 if close else 11)
