"""What rank 0 prints: a table of steps, a progress bar on a terminal, the memory of the ranks, the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpi_ckpt.storage.manifest import ShardManifest
from mpi_ckpt.train.terminal import someone_watches

_TIERS = {"local": "the nodes", "shared": "the shared directory", "remote": "the remote tier"}
_FEW = 4  # names of files that a line has room for
_COLUMNS = ("step", "loss", "lr", "param norm", "grad norm", "ms")


class StepTable:
    """The steps of this launch, a row every `every` steps and for the last; silent where `enabled` is False."""

    def __init__(self, first: int, last: int, every: int, *, enabled: bool) -> None:
        self._first, self._last, self._every, self._enabled = first, last, every, enabled
        self._progress: Progress | None = None

    def __enter__(self) -> StepTable:
        if self._enabled:
            if someone_watches():  # a log file gets plain lines only
                columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()
                self._progress = Progress(*columns, transient=True, console=Console(force_terminal=True))
                self._task = self._progress.add_task("train", total=self._last, completed=self._first - 1)
                self._progress.start()
            self._print("{:>6} {:>9} {:>9} {:>11} {:>10} {:>8}".format(*_COLUMNS))
        return self

    def row(self, row: dict[str, Any]) -> None:
        """**Local.** One finished step, as it goes to the metrics."""
        step = row["step"]
        if self._progress:
            self._progress.update(self._task, completed=step)
        if self._enabled and ((step - self._first + 1) % self._every == 0 or step == self._last):
            ms = 1e3 * row["step_seconds"]
            self._print(
                f"{step:6d} {row['loss']:9.4f} {row['lr']:9.2e} {row['param_norm']:11.5f} "
                f"{row['grad_norm']:10.5f} {ms:8.2f}"
            )

    def evaluation(self, row: dict[str, Any]) -> None:
        """**Local.** An evaluation, as it goes to the metrics."""
        if self._enabled:
            self._print(f"{row['step']:6d} evaluation: loss {row['eval_loss']:.4f} over {row['eval_tokens']} tokens")

    def _print(self, line: str) -> None:
        if self._progress:
            self._progress.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()


def resumed(run_dir: Path, step: int, events: Mapping[str, dict[str, Any]]) -> str:
    """Where a launch goes on. By the newest `restore`, `rebuild` and `local_loss` among `events`: from which tier, what
    of it was rebuilt, and which shards came from which other tier."""
    tier = events.get("restore", {}).get("tier")
    text = f"resumed {run_dir} after step {step}" + (f" from {_TIERS[tier]}" if tier in _TIERS else "")
    rebuild, loss = (events.get(name, {}) if tier == "local" else {} for name in ("rebuild", "local_loss"))
    if rebuild.get("step") == step and rebuild["rebuilt"]:
        text += f"; rebuilt {_few(rebuild['rebuilt'])}"
    for origin, files in loss["fetched"].items() if loss.get("step") == step else ():
        text += f"; {_few(files)} from {_TIERS[origin]}"
    return text


def _few(files: Sequence[str]) -> str:
    return ", ".join(files[:_FEW]) + (f" and {len(files) - _FEW} more" if len(files) > _FEW else "")


def print_memory(rows: Sequence[Sequence[float]], num_params: int) -> None:
    """Bytes a rank, from `rows` [ranks, 4]: parameters, gradients, optimizer state (12 P / N beside it), resident."""
    print("\nmemory, bytes a rank")
    print(f"{'rank':>6} {'params':>12} {'gradients':>12} {'optimizer':>12} {'12 P / N':>14} {'resident':>14}")
    ideal = 12 * num_params / len(rows)
    for rank, row in enumerate(rows):
        params, gradients, optimizer, resident = (int(value) for value in row)
        print(f"{rank:6d} {params:12d} {gradients:12d} {optimizer:12d} {ideal:14.1f} {resident:14d}")
    for name, reduce in (("max", max), ("mean", lambda values: sum(values) / len(values))):
        columns = [reduce([row[i] for row in rows]) for i in range(4)]
        print("{:>6} {:12.0f} {:12.0f} {:12.0f} {:14.1f} {:14.0f}".format(name, *columns[:3], ideal, columns[3]))


def print_manifest(manifest: ShardManifest, directory: Path) -> None:
    """A checkpoint in short: its shards with their part of the flat parameters."""
    total = sum(shard.nbytes for shard in manifest.shards)
    print(f"\ncheckpoint {directory}: step {manifest.step}, {manifest.world_size} ranks, {total} bytes")
    print(f"{'rank':>6}  {'file':<14} {'bytes':>10} {'offset':>10} {'numel':>10}  sha256")
    for shard in manifest.shards:
        interval = shard.param_shard_offset, shard.param_shard_numel
        offset, numel = ("-", "-") if None in interval else interval
        print(f"{shard.rank:6d}  {shard.path:<14} {shard.nbytes:10d} {offset:>10} {numel:>10}  {shard.sha256[:16]}...")
