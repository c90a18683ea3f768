"""What the tests of the verbs share: a run that four ranks saved, once, and the verbs as a user calls them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from mpi_ckpt import cli
from tests.checkpoints import flip, manifest_of, shard_file
from tests.launch import HANG, ROOT, Launcher

RANKS = 4


@functools.cache
def _original() -> Path:
    """`<here>/checkpoints` with steps 10, 20 and 30, saved by four ranks."""
    directory = Path(tempfile.mkdtemp(prefix="mpi-ckpt-tools-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    Launcher(directory)(RANKS, "-m", "tests.programs.tool_states", "save", str(directory / "checkpoints")).check()
    return directory


def copy_of_run(place: Path) -> Path:
    """A run directory of the test's own."""
    shutil.copytree(_original() / "checkpoints", place / "run" / "checkpoints")
    return place / "run"


def flip_in_array(root: Path, step: int, rank: int, key: str) -> Path:
    """Damage an array of a step in a rank's file; the file."""
    (block, *_) = manifest_of(root, step)["shards"][rank]["blocks"][key]
    path = shard_file(root, step, rank)
    flip(path, block["offset"] + 3)
    return path


def save_on_nodes(
    place: Path, domains: str, redundancy: str = "xor", steps: tuple[int, ...] = (10, 20), seed: int = 0
) -> Path:
    """Steps 10 and 20 of ranks in these failure domains, each node a directory `<here>/<domain>`."""
    task = {"root": f"{place}/shared", "local": f"{place}/nodes/{{domain}}", "domains": [*domains], "seed": seed}
    task |= {"redundancy": redundancy, "save": steps, "options": {"shared_every": 100}}
    place.mkdir(exist_ok=True)
    Launcher(place)(len(domains), "-m", "tests.programs.nodes", json.dumps(task)).check()
    return place / "nodes"


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def verb(*arguments: object) -> Said:
    """A verb, called in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # argparse, for bad usage and --help
            status = int(end.code or 0)
    return Said(status, out.getvalue(), err.getvalue())


def command(*arguments: object) -> list[str]:
    """The same as a command line."""
    return [sys.executable, "-m", "mpi_ckpt", *map(str, arguments)]


def program(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False, **options
    )
