"""`watch`: what it shows is what the files say, while they grow, are replaced, and before there are any."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from mpi_ckpt.tools.metrics_file import MetricsFile
from mpi_ckpt.tools.run_reader import RunReader
from mpi_ckpt.tools.watch_frame import Sparkline, eta, frame
from tests.launch import HANG, ROOT
from tests.run_logs import NBYTES, SETTINGS, Log, eventful, row
from tests.tool_cases import command, program, verb


def shown(log: Log, after: float = 0.0) -> str:
    """The frame of a run, `after` seconds after its last line."""
    reader = RunReader(log.run_dir)
    reader.refresh()
    console = Console(file=io.StringIO(), width=100)
    console.print(frame(reader, log.now + after))
    return console.file.getvalue()


def line_of(frame: str, label: str) -> str:
    return next(line for line in frame.splitlines() if line.split(" ")[0] == label)


# -- the file, while it changes --------------------------------------------------------------------------------------


def numbers(file: MetricsFile) -> tuple[list[int], bool]:
    lines, anew = file.poll()
    return [line["n"] for line in lines], anew


def test_each_line_is_read_once_and_only_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert numbers(file) == ([], False)
    path.write_text('{"n": 1}\n{"n": 2}\n{"n"')
    assert numbers(file) == ([1, 2], False)
    assert numbers(file) == ([], False)
    with path.open("a") as end:
        end.write(": 3}\n")
    assert numbers(file) == ([3], False)


def test_a_line_that_a_crash_cut_short_and_the_next_launch_removed_was_never_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 1}\n{"n": 2, "lo')
    file = MetricsFile(path)
    assert numbers(file) == ([1], False)
    path.write_text('{"n": 1}\n')
    assert numbers(file) == ([], False)
    path.write_text('{"n": 1}\n{"n": 3}\n')
    assert numbers(file) == ([3], False)


@pytest.mark.parametrize("other", ['{"n": 7}\n', '{"n": 7}\n{"n": 8}\n', '{"n": 7}\n{"n": 8}\n{"n": 9}\n'])
@pytest.mark.parametrize("how", ["truncated", "replaced"])
def test_a_file_that_begins_anew_is_read_anew_whatever_its_length(tmp_path, other, how):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n')
    file = MetricsFile(path)
    assert numbers(file) == ([1, 2], False)
    if how == "replaced":
        (tmp_path / "new").write_text(other)
        os.replace(tmp_path / "new", path)
    else:
        path.write_text(other)
    assert numbers(file) == ([json.loads(line)["n"] for line in other.splitlines()], True)
    path.unlink()
    assert numbers(file) == ([], True)
    assert numbers(file) == ([], False)


def test_a_run_that_begins_anew_forgets_the_old_one(tmp_path):
    log = eventful(tmp_path / "run")
    reader = RunReader(log.run_dir)
    reader.refresh()
    assert reader.history.curve.steps[-1] == 60
    log.path.unlink()
    log.steps(1, 2)
    reader.refresh()
    assert list(reader.history.curve.steps) == [1, 2]
    assert reader.history.saves == reader.history.events == []


# -- a frame ---------------------------------------------------------------------------------------------------------


def test_a_frame_tells_step_loss_speed_checkpoint_and_events(tmp_path):
    log = Log(tmp_path / "run", steps=200)
    log.event("launch", 0, ranks=4, settings=SETTINGS)
    log.steps(1, 50)
    log.event("evaluation", 50, eval_loss=3.625)
    log.save(50)
    log.event("rollback", 53, target=50, reason="spike")
    log.steps(51, 60)
    found = shown(log, after=3)
    assert found.splitlines()[0].split() == ["run", "4", "ranks", "running"]
    assert line_of(found, "step").split()[:4] == ["step", "60", "of", "200"]
    assert "30%" in line_of(found, "step")
    assert line_of(found, "loss").split() == ["loss", "3.4000"]
    assert line_of(found, "evaluation").split()[1] == "3.6250"
    assert "256 tokens/s" in line_of(found, "speed")
    assert "500 ms a step" in line_of(found, "speed")
    checkpoint = line_of(found, "checkpoint")
    assert "step 50" in checkpoint
    assert "committed 14 s ago" in checkpoint  # the rollback, ten steps, and the three seconds
    assert "7.6 MiB" in checkpoint
    assert "saving" not in found
    assert re.search(r"13 s ago +step 53 +rollback +target 50, reason spike", found)


def test_the_save_in_flight_shows_how_much_of_it_is_written(tmp_path):
    log = Log(tmp_path / "run", steps=200)
    log.steps(1, 50)
    log.save(50, commit=False)
    directory = log.run_dir / "checkpoints" / "step_00000050"
    directory.mkdir(parents=True)
    (directory / "rank00000.h5.tmp").write_bytes(b"x" * (NBYTES // 4))
    assert (
        line_of(shown(log, after=7), "saving").split(maxsplit=1)[1].rstrip() == "step 50   25% of 7.6 MiB   since 7 s"
    )
    log.event("commit", 50, nbytes=NBYTES, commit_seconds=1.0)
    assert "saving" not in shown(log)


def test_the_time_to_go_is_that_of_the_last_steps_stalls_included(tmp_path):
    log = Log(tmp_path / "run", steps=130)
    log.steps(1, 100)  # a second each, of which the step takes half
    reader = RunReader(log.run_dir)
    reader.refresh()
    assert eta(reader) == pytest.approx(30)
    assert "30 s to go" in shown(log)
    log.run_dir.joinpath("run.json").unlink()
    reader.refresh()
    assert math.isnan(eta(reader))


@pytest.mark.parametrize(
    ("event", "fields", "words"),
    [
        ("finish", {"reason": "finished"}, "finished"),
        ("finish", {"reason": "stop-at"}, "stopped at a step, as asked"),
        ("preemption", {"reason": "SIGTERM"}, "preempted"),
        ("hang", {"seconds": 600.0}, "hung"),
        ("launch", {"ranks": 2}, "no line for 10 min 0 s: killed, or in a long step"),
    ],
)
def test_the_state_is_how_the_newest_launch_ended(tmp_path, event, fields, words):
    log = Log(tmp_path / "run")
    log.event("launch", 0)
    log.steps(1, 3)
    log.event(event, 3, **fields)
    assert words in shown(log, after=600).splitlines()[0]
    log.event("launch", 3)
    assert "running" in shown(log).splitlines()[0]


def test_a_log_of_an_older_version_and_a_loss_that_is_not_finite_are_shown(tmp_path):
    log = Log(tmp_path / "run")
    log.raw(json.dumps(row(1, 2.0)) + "\n" + json.dumps({"step": 2, "loss": None}) + "\n{torn")
    found = shown(log)
    assert "not finite" in line_of(found, "loss")
    assert line_of(found, "step").split() == ["step", "2"]
    assert "none yet" in line_of(found, "checkpoint")


def test_the_sparkline_falls_as_the_loss_does_also_in_ascii():
    def drawn(encoding: str) -> str:
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        Console(file=file, width=100).print(Sparkline([4.0, math.nan, 3.0, 2.0, 1.0]))
        file.seek(0)
        return file.read().strip()

    assert drawn("utf-8") == "█▆▃▁"
    assert drawn("ascii") == "#*-_"


# -- the verb --------------------------------------------------------------------------------------------------------


def test_once_prints_a_frame_without_control_codes(tmp_path):
    log = eventful(tmp_path / "run")
    said = program("watch", log.run_dir, "--once")
    assert (said.returncode, said.stderr) == (0, "")
    assert "step 60 of 60" in said.stdout
    assert "\x1b" not in said.stdout
    assert program("watch", log.run_dir).stdout.splitlines()[0] == said.stdout.splitlines()[0]  # no terminal: the same
    ascii_only = program("watch", log.run_dir, env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert ascii_only.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["{here}/none", "--once"], 3, "no such file"),
        (["{here}/empty", "--once"], 3, "no line of metrics"),
        (["{here}/file", "--once"], 1, "expected a directory"),
        (["{here}/empty", "--every", "never"], 2, "expected seconds"),
        (["{here}/empty", "--every", "nan"], 2, "expected seconds"),
        ([], 2, "RUN_DIR"),
    ],
)
def test_an_error_is_a_plain_line(tmp_path, arguments, status, words):
    Log(tmp_path / "empty").raw("")
    (tmp_path / "file").write_text("")
    said = verb("watch", *(word.format(here=tmp_path) for word in arguments))
    assert (said.status, said.out) == (status, "")
    assert words in said.err


class Terminal:
    """The verb on a terminal of its own."""

    def __init__(self, *arguments: object) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            command("watch", *arguments, "--every", "0.1"), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def until(self, words: str, timeout: float = HANG) -> None:
        """Read what is shown until `words` are in it."""
        deadline = time.monotonic() + timeout
        while words not in self.seen:
            assert time.monotonic() < deadline, self.seen[-3000:]
            self._read(0.1)

    def end(self, timeout: float = HANG) -> int:
        """The exit status, once the verb has ended by itself."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen[-3000:]
            self._read(0.1)
        self._read(0.1)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self, wait: float) -> None:
        if select.select([self._ours], [], [], wait)[0]:
            with contextlib.suppress(OSError):  # the other side is closed
                self.seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._ours, 65536).decode(errors="replace"))


@pytest.fixture
def terminal():
    opened: list[Terminal] = []

    def start(*arguments: object) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_it_waits_for_a_run_follows_it_and_leaves_when_it_has_finished(launch, tmp_path, terminal):
    watched = terminal(tmp_path / "run")
    watched.until("waiting for")
    options = ["--run-dir", tmp_path / "run", "--steps", 60, "--ckpt-every", "20steps"]
    launch.train(2, *options, "--stop-at", 30).check()
    watched.until("stopped at a step, as asked")
    watched.until("step 30 of 60")
    assert watched.process.poll() is None  # it may go on
    launch.train(2, *options).check()
    watched.until("step 60 of 60")
    assert watched.end() == 0
    assert "2 ranks" in watched.seen
    assert "finished" in watched.seen
    assert "Traceback" not in watched.seen


def test_ctrl_c_leaves_with_the_status_of_an_interrupt_and_the_cursor_back(tmp_path, terminal):
    watched = terminal(tmp_path / "none")
    watched.until("waiting for")
    watched.process.send_signal(signal.SIGINT)
    assert watched.end() == 130
    assert "error: interrupted" in watched.seen
    assert "Traceback" not in watched.seen


def test_watching_does_not_start_mpi_and_changes_nothing(tmp_path):
    log = eventful(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in log.run_dir.rglob("*")}
    check = (
        f"import sys; from mpi_ckpt import cli; assert cli.main(['watch', {str(log.run_dir)!r}, '--once']) == 0; "
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=HANG, stdout=subprocess.DEVNULL)
    assert {path: path.stat().st_mtime_ns for path in log.run_dir.rglob("*")} == before
