"""A run's directory as `report` and `watch` see it: its log and its settings. Files only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpi_ckpt.errors import CheckpointError, NoCheckpoint
from mpi_ckpt.storage.run_file import RUN_FILE
from mpi_ckpt.tools.history import History
from mpi_ckpt.tools.metrics_file import FILE_NAME, MetricsFile


class NothingRecorded(NoCheckpoint):
    """There is no run in the directory, or it has not recorded anything yet."""


class RunReader:
    """One run's directory: `history` and what `run.json` says, as far as they are there; brought up to date on call."""

    def __init__(self, run_dir: Path) -> None:
        """**Local.** Reads nothing yet."""
        self.run_dir = run_dir
        self.history = History()
        self.settings: dict[str, Any] = {}
        self.steps: int | None = None  # of the whole run
        self.file = MetricsFile(run_dir / FILE_NAME)

    def refresh(self) -> None:
        """**Local.** Read what is new. Raises CheckpointError where the run's directory is none, OSError."""
        if self.run_dir.exists() and not self.run_dir.is_dir():
            raise CheckpointError(
                "this is no run's directory",
                path=self.run_dir,
                found="a file",
                expected="a directory",
                action="Name the --run-dir of the training command.",
            )
        while True:
            lines, anew = self.file.poll()
            if anew:
                self.history = History()
            for line in lines:
                self.history.add(line)
            if not lines:
                break
        self._read_settings()

    def require(self) -> None:
        """**Local.** Read what is new. Raises NothingRecorded where there is no line, CheckpointError, OSError."""
        self.refresh()
        if not self.history.last:
            raise NothingRecorded(
                "there is no record of a run here",
                path=self.file.path,
                found="no line of metrics" if self.file.path.exists() else "no such file",
                expected="the file that the training program writes",
                action="Name the --run-dir of the training command.",
            )

    def _read_settings(self) -> None:
        """`run.json`, or a launch's settings where it cannot be read: what is shown of them is an extra."""
        try:
            document = json.loads((self.run_dir / RUN_FILE).read_bytes())
        except (OSError, ValueError):
            document = None
        stored = document if isinstance(document, dict) else {}
        steps = stored.get("steps")
        self.steps = steps if isinstance(steps, int) and steps > 0 else None
        launched = (line.get("settings") for line in reversed(self.history.events) if line["event"] == "launch")
        settings = stored.get("settings") or next(launched, None)
        self.settings = settings if isinstance(settings, dict) else {}
