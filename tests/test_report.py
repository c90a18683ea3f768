"""`report`: the page says what the log says, in a real browser, on any screen; and is plain about what is not there."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_ckpt.tools.report_decimate import extremes
from tests.browser import CHROMIUM, Browser
from tests.launch import HANG, ROOT
from tests.run_logs import NBYTES, Log, eventful, row
from tests.tool_cases import program, verb

pytest.importorskip("plotly", reason="plotly is not installed: pip install '.[report]'")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="neither chromium nor google-chrome is on PATH")
SCALING = [
    {"mode": "strong", "ranks": 2, "tokens_per_second": 300.0, "compute_seconds": 3.0, "communication_seconds": 1.0},
    {"mode": "strong", "ranks": 1, "tokens_per_second": 200.0, "compute_seconds": 6.0, "communication_seconds": 0.0},
    {"mode": "weak", "ranks": 1, "tokens_per_second": 200.0, "compute_seconds": 6.0, "checkpoint_stall_seconds": 2.0},
    {"mode": "weak", "ranks": 4, "tokens_per_second": 720.0},
]


def report(*arguments: object) -> str:
    """The page that the verb writes."""
    said = verb("report", *arguments)
    assert (said.status, said.err) == (0, ""), said
    return Path(said.out.strip()).read_text()


def figures(page: str) -> dict[str, dict]:
    """The drawings of a page by their titles."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    titles = dict(re.findall(r'<h3 id="(figure-\d+)-title">(.*?)</h3>', page))
    return {html.unescape(titles[name]): drawing for name, drawing in json.loads(found[1]).items()}


def trace(drawing: dict, name: str) -> dict:
    return next(trace for trace in drawing["data"] if trace.get("name") == name)


def points(drawing: dict, name: str) -> dict:
    found = trace(drawing, name)
    return dict(zip(found["x"], found["y"], strict=True))


def details(page: str, title: str) -> list[list[str]]:
    """The cells of the table under a heading, as text."""
    table = re.search(rf"<summary>{title}.*?<tbody>(.*?)</tbody>", page)[1]
    rows = re.findall("<tr>(.*?)</tr>", table)
    return [[html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall("<td.*?>(.*?)</td>", r)] for r in rows]


# -- what the log says -----------------------------------------------------------------------------------------------


def test_a_real_run_that_was_killed_and_resumed_is_drawn_as_its_log_says(launch, tmp_path):
    options = ["--run-dir", tmp_path / "run", "--steps", 4000, "--ckpt-every", "20steps"]
    job = launch.start(2, "-m", "mpi_ckpt.train", *options)
    log = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline and (not log.exists() or b'"commit"' not in log.read_bytes()):
        time.sleep(0.02)
    job.end()
    launch.train(2, *options, "--stop-at", 120).check()

    rows = [line for line in map(json.loads, log.read_text().splitlines()) if "event" not in line]
    counted = {row["step"]: row["loss"] for row in rows}
    drawing = figures(report(tmp_path / "run"))
    drawn = points(drawing["Loss"], "training")
    assert list(drawn) == sorted(counted)
    assert drawn == pytest.approx(counted, rel=1e-5)
    again = len(rows) - len(counted)
    taken_back = [step for t in drawing["Loss"]["data"] if t.get("name") == "taken back" for step in t["x"] if step]
    assert len(taken_back) == again
    assert trace(drawing["Loss"], "resumed")["x"][0] % 20 == 0
    assert {"Learning rate", "Step time", "Checkpoint timeline", "Cost of a checkpoint", "Write rate"} <= drawing.keys()


def test_of_repeated_steps_the_last_attempt_counts_and_the_others_are_faint(tmp_path):
    drawing = figures(report(eventful(tmp_path / "run").run_dir))["Loss"]
    loss = points(drawing, "training")
    assert sorted(loss) == list(range(1, 61))
    assert loss[10] == pytest.approx(4.0 - 0.10)  # the first attempt
    assert loss[15] == pytest.approx(3.9 - 0.15)  # after the rollback
    assert loss[30] == pytest.approx(3.8 - 0.30)  # the third attempt at it
    faint = trace(drawing, "taken back")
    assert faint["opacity"] < 0.5
    assert faint["x"] == [*range(11, 16), None, *range(21, 34), None, *range(21, 41), None]
    assert faint["y"][4] is None  # the loss that was not finite
    assert trace(drawing, "rolled back")["x"] == [10]
    assert trace(drawing, "resumed")["x"] == [20, 20, 20]
    assert trace(drawing, "preempted")["x"] == [40]
    assert points(drawing, "evaluation") == {20: 3.75}


def test_a_checkpoint_shows_its_times_its_bytes_and_how_it_ended(tmp_path):
    page = report(eventful(tmp_path / "run").run_dir)
    saves = {int(cells[0]): cells for cells in details(page, "Checkpoints")}
    states = {step: cells[1] for step, cells in saves.items()}
    assert states == {10: "pruned", 20: "committed", 30: "lost", 40: "damaged", 60: "committed"}
    assert saves[20][2:7] == ["8,000,000", "250", "1", "2", "2"]  # bytes, ms, s, s, 8 MB / 4 ranks / 1 s
    assert saves[30][4:6] == ["–", "–"]
    drawing = figures(page)
    assert points(drawing["Write rate"], "run") == {10: 2.0, 20: 2.0, 40: 2.0, 60: 4.0}  # two ranks in the end
    assert points(drawing["Step time"], "checkpoint stall")[20] == 750  # a step of 500 ms and the stall after it
    assert trace(drawing["Checkpoint timeline"], "lost")["y"] == [30]
    timeline = drawing["Checkpoint timeline"]
    committed = points(timeline, "committed")
    staged, written = points(timeline, "staged"), points(timeline, "written")
    at = {
        step: [next(t for t, s in kind.items() if s == step) for kind in (staged, written, committed)]
        for step in (20, 60)
    }
    for when in at.values():
        unit = 60.0  # minutes: the run took longer than two
        assert (when[1] - when[0]) * unit == pytest.approx(1, abs=0.02)
        assert (when[2] - when[0]) * unit == pytest.approx(2, abs=0.02)


def test_a_rollback_replaces_its_target_and_discards_what_came_later(tmp_path):
    log = Log(tmp_path / "run")
    log.steps(1, 10)
    log.save(10)
    log.steps(11, 20)
    log.save(20)
    log.steps(21, 23)
    log.event("commit", 10, nbytes=NBYTES, commit_seconds=1.0)  # again, with the skip set
    log.event("rollback", 23, target=10)
    cells = details(report(log.run_dir), "Checkpoints")
    assert [row[:2] for row in cells] == [["10", "committed"], ["20", "discarded"], ["10", "replaced"]]


def test_every_event_is_in_the_table_also_those_of_later_versions(tmp_path):
    cells = details(report(eventful(tmp_path / "run").run_dir), "Events")
    names = [row[1] for row in cells]
    expected = {"launch", "injection", "rollback", "skip", "restore", "preemption", "damage", "hang"}
    assert set(names) == expected | {"something new", "finish"}
    assert names.count("launch") == 4
    rollback = cells[names.index("rollback")]
    assert rollback[4].startswith("2026-09-21 14:1")
    assert rollback[0] == "15"
    assert "skipped [[80, 120]]" in rollback[2]
    assert "<b id=evil>" in cells[names.index("damage")][2]  # as text


def test_memory_has_each_rank_and_the_max_and_mean(tmp_path):
    page = report(eventful(tmp_path / "run").run_dir)
    drawing = figures(page)["Memory a rank"]
    assert points(drawing, "resident") == pytest.approx({rank: (rank + 1) * 1e8 / 2**20 for rank in range(4)}, rel=1e-5)
    assert f"resident {4e8 / 2**20:,.1f} and {2.5e8 / 2**20:,.1f}" in page


def test_several_runs_lie_over_each_other_each_in_its_colour(tmp_path):
    first, second = eventful(tmp_path / "first"), Log(tmp_path / "second" / "first", steps=9)
    second.steps(1, 5)
    page = report(first.run_dir, second.run_dir, "--out", tmp_path / "both.html")
    loss = figures(page)["Loss"]
    names = [str(first.run_dir), str(second.run_dir)]  # their directories have one name: their paths then
    colours = [trace(loss, name)["line"]["color"] for name in names]
    assert len(set(colours)) == 2
    assert list(points(loss, names[1])) == [1, 2, 3, 4, 5]
    assert not (first.run_dir / "report.html").exists()


def test_scaling_is_drawn_relative_to_the_fewest_ranks(tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps({"scaling": SCALING, "machine": "any"}))
    drawing = figures(report(eventful(tmp_path / "run").run_dir, "--scaling", tmp_path / "scaling.json"))
    assert points(drawing["Throughput"], "strong") == {1: 200, 2: 300}
    assert points(drawing["Parallel efficiency"], "strong") == {1: 100, 2: 75}
    assert points(drawing["Parallel efficiency"], "weak") == {1: 100, 4: 90}
    assert points(drawing["Where the time goes, strong scaling"], "communication") == {"1": 0, "2": 25}
    assert points(drawing["Where the time goes, weak scaling"], "checkpoint stall") == {"1": 25, "4": None}


# -- long runs -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=400), st.integers(1, 20))
def test_decimated_points_are_real_and_no_extreme_is_lost(values, buckets):
    kept, size = extremes(values, buckets)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(4 * buckets, 3 * buckets + 2)
    if values:
        assert {0, len(values) - 1} <= set(kept)
    for start in range(0, len(values), size):
        bucket, shown = values[start : start + size], [values[i] for i in kept if start <= i < start + size]
        assert any(map(math.isnan, bucket)) == any(map(math.isnan, shown))  # a gap stays a gap
        bucket, shown = ([value for value in some if not math.isnan(value)] for some in (bucket, shown))
        assert (min(bucket, default=0), max(bucket, default=0)) == (min(shown, default=0), max(shown, default=0))


def test_a_long_run_makes_a_light_page_that_says_it_is_decimated(tmp_path):
    log = Log(tmp_path / "run")
    losses = 3 + np.sin(np.arange(40_000) / 5000)
    losses[27_777] = 9.0
    text = "\n".join(json.dumps(row(step, float(loss))) for step, loss in enumerate(losses, start=1))
    log.raw(text + "\n")
    page = report(log.run_dir)
    drawing = figures(page)["Loss"]
    assert "Of every 80 steps the lowest and the highest are drawn" in page
    assert points(drawing, "training")[27_778] == 9.0
    assert sum(len(t["x"]) for t in drawing["data"]) < 2000
    assert len(json.dumps(figures(page))) < 500_000


def test_attempts_that_were_taken_back_do_not_flatten_the_curve(tmp_path):
    log = Log(tmp_path / "run")
    log.steps(1, 10)
    log.write(row(11, 1e9))
    log.event("rollback", 11, target=10)
    log.steps(11, 20)
    page = report(log.run_dir)
    assert figures(page)["Loss"]["layout"]["yaxis"]["range"][1] < 10
    assert "Some of these went above" in page


# -- logs that are old, cut short, or not there ----------------------------------------------------------------------


def test_an_older_version_s_log_without_times_and_events_is_drawn(tmp_path):
    log = Log(tmp_path / "run")
    for step in (1, 2, 3, 2, 3, 4):
        log.raw(json.dumps({"step": step, "loss": 1.0 / step}) + "\n")
    log.raw('{"event": "commit", "step": 4}\n')
    page = report(log.run_dir)
    assert points(figures(page)["Loss"], "training") == pytest.approx({1: 1, 2: 1 / 2, 3: 1 / 3, 4: 1 / 4}, rel=1e-5)
    assert trace(figures(page)["Loss"], "taken back")["x"] == [2, 3, None]
    assert details(page, "Checkpoints") == [["4", "committed", *"–––––––"]]


def test_a_torn_last_line_is_not_there_and_lines_that_are_no_json_are_owned_up_to(tmp_path):
    log = Log(tmp_path / "run")
    log.steps(1, 3)
    log.raw('\x00\x00garbage\n[1, 2]\n{"step": "four", "loss": 1}\n{"step": 4, "loss": 0.5, "ti')
    page = report(log.run_dir)
    assert list(points(figures(page)["Loss"], "training")) == [1, 2, 3]
    assert "2 lines could not be read" in page


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["{here}/none"], 3, "no such file"),
        (["{here}/empty"], 3, "no line of metrics"),
        (["{here}/good", "{here}/none"], 3, "none/metrics.jsonl"),
        (["{here}/file"], 1, "found a file; expected a directory"),
        (["{here}/good", "--out", "/proc/none/report.html"], 1, "/proc/none"),
        (["{here}/good", "--scaling", "{here}/none.json"], 1, "none.json"),
        (["{here}/good", "--scaling", "{here}/good/run.json"], 1, "this is no scaling result"),
        (["{here}/good", "--scaling", "{here}/half.json"], 1, "1 measurements, not all of them whole"),
        ([], 2, "RUN_DIR"),
    ],
)
def test_an_error_is_a_plain_line_and_no_page_is_written(tmp_path, arguments, status, words):
    Log(tmp_path / "good", steps=3).steps(1, 3)
    Log(tmp_path / "empty").raw("")
    (tmp_path / "file").write_text("")
    (tmp_path / "half.json").write_text('{"scaling": [{"mode": "strong", "ranks": 2}]}')
    said = verb("report", *(word.format(here=tmp_path) for word in arguments))
    assert (said.status, said.out) == (status, "")
    assert words in said.err
    assert "Traceback" not in said.err
    assert not list(tmp_path.rglob("*.html"))


def test_without_plotly_the_error_says_what_to_install(tmp_path):
    Log(tmp_path / "run").steps(1, 3)
    (tmp_path / "plotly.py").write_text("raise ModuleNotFoundError(\"No module named 'plotly'\", name='plotly')\n")
    said = program("report", tmp_path / "run", env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"})
    assert said.returncode == 1
    assert "pip install plotly" in said.stderr
    assert "Traceback" not in said.stderr


def test_the_other_verbs_do_not_need_plotly():
    check = "from mpi_ckpt import cli; import sys; assert 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=HANG)


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="module", params=["one run", "two runs"])
def page(request, browser, tmp_path_factory):
    """A page with every figure, open in the browser."""
    here = tmp_path_factory.mktemp("page")
    (here / "scaling.json").write_text(json.dumps({"scaling": SCALING}))
    runs = [eventful(here / "a run with a rather long name <b id=evil>").run_dir]
    if request.param == "two runs":
        runs.append(eventful(here / "other").run_dir)
    out = here / "report.html"
    report(*runs, "--scaling", here / "scaling.json", "--out", out)
    browser.complaints.clear()
    browser.requests.clear()
    browser.look(1280, "light")
    browser.open(out)
    return out


MARKS = "'.scatterlayer .js-line, .scatterlayer .point, .barlayer .point path'"


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_on_any_screen_every_figure_is_drawn_and_nothing_sticks_out(browser, page, width, scheme):
    browser.look(width, scheme)
    # Every drawing has marks that are seen, and lies within the page, as everything does but in boxes that scroll.
    drawn = browser.run(
        f"[...document.querySelectorAll('.drawing')].map(d => [...d.querySelectorAll({MARKS})]"
        ".filter(m => m.getBoundingClientRect().width + m.getBoundingClientRect().height > 0).length)"
    )
    assert len(drawn) == browser.run("document.querySelectorAll('figure').length") >= 12
    assert min(drawn) >= 1
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    outside = browser.run(
        "[...document.querySelectorAll('h1, h2, h3, p, dd, figure, .scroll, .main-svg, .legendtext, summary')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]


@needs_browser
def test_the_scheme_changes_page_and_figures_together(browser, page):
    look = (
        "[getComputedStyle(document.body).backgroundColor, "
        "getComputedStyle(document.querySelector('.ytick text')).fill, "
        "getComputedStyle(document.querySelector('.js-line')).stroke]"
    )
    browser.look(1280, "light")
    light = browser.run(look)
    browser.look(1280, "dark")
    dark = browser.run(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    browser.look(1280, "light")
    assert browser.run(look) == light


@needs_browser
def test_figures_have_names_and_axes_have_units_for_who_does_not_see_them(browser, page):
    names = browser.run(
        "[...document.querySelectorAll('.drawing')].map(d => d.getAttribute('role') == 'img' && "
        "['labelledby', 'describedby'].every(k => document.getElementById(d.getAttribute('aria-' + k)).textContent))"
    )
    assert names
    assert all(names)
    titles = browser.run("[...document.querySelectorAll('.drawing')].map(d => d.querySelector('.ytitle').textContent)")
    assert {"loss, nats a token", "milliseconds", "MB/s a rank", "MiB", "percent"} <= set(titles)
    assert browser.run("document.querySelector('#evil') === null && document.documentElement.lang") == "en"


def test_colours_can_be_told_from_the_paper_in_both_schemes():
    """Contrast of text at least 4.5, of curves 3: https://www.w3.org/TR/WCAG22/ 1.4.3 and 1.4.11."""

    def luminance(colour):
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (x / 255 for x in bytes.fromhex(colour))
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    css = (ROOT / "mpi_ckpt" / "tools" / "report.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = {name: luminance(value) for name, value in re.findall(r"--([\w-]+): #(\w{6})", scheme)}
        assert len(colours) == 14
        for name, value in colours.items():
            if name not in ("paper", "line"):
                high, low = max(value, colours["paper"]), min(value, colours["paper"])
                least = 4.5 if name in ("ink", "quiet", "alert", "good") else 3
                assert (high + 0.05) / (low + 0.05) >= least, name
