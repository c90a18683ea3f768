"""What an asynchronous save costs the application: how long `save` blocks, and how much slower the steps beside it are.

    python benchmarks/stall.py [--ranks 4] [--mib 512] [--rounds 5] [--dir DIR] [--json FILE]

The stall is the time that `save` of a default Checkpointer keeps the slowest rank; nothing was in flight before. It is
compared with a memcpy of the same arrays to memory that was touched before, and with the time until PyTorch DCP's
async_save returns: as it is by default, and with a stager that is kept and has touched its memory (the figure is of
the default). Every save is waited for, unmeasured, before the next contender's turn.

The step is MiniGPT's, with ZeRO-1 over all ranks, small enough (a few ms) that hundreds fall into one save; its own
state is not what is saved. Its mean time while a save is in flight is divided by the mean without one, measured just
before: with the writer's threads at the priority of the training's, and with `background_nice=10`, the setting that
bounds it. The CPU share is what all threads but the training's own use in that time, in cores, of all ranks together.
See `_io_bench.py` for how it is measured.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _common import median, spread
from _io_bench import (
    arrays_of,
    in_turns,
    launch,
    leave_result,
    parse_arguments,
    ratio,
    report,
    settle,
    timed,
    zero_state,
)

if TYPE_CHECKING:
    from mpi4py import MPI

MEMCPY, OURS = "warm memcpy", "ours: save()"
DCP, DCP_KEPT = "PyTorch DCP async_save", "the same with a kept stager"
PLAIN, DURING, DURING_DCP = "a step", "a step while ours saves", "a step while DCP saves"
DURING_NICE = "the same, background_nice=10"
TARGETS = {"stall_vs_memcpy": "<= 1.2", "stall_vs_dcp": "<= 0.15"}
MODEL = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 64, "seq_len": 32}
BATCH = 4  # sequences a rank
PLAIN_STEPS = 200


def main() -> None:
    args = parse_arguments(__doc__, mib=512)
    if args.worker:
        work(args)
        return
    result = launch(__file__, args, "torch", "safetensors", "h5py")
    stall, steps = result["stall_seconds"], result["step_seconds"]
    figures = {
        "stall_vs_memcpy": ratio(stall[OURS], stall[MEMCPY]),
        "stall_vs_dcp": ratio(stall[OURS], stall[DCP]),
        "stall_vs_dcp_kept_stager": ratio(stall[OURS], stall[DCP_KEPT]),
        "step_during_save": ratio(steps[DURING], steps[PLAIN]),
        "step_during_nice_save": ratio(steps[DURING_NICE], steps[PLAIN]),
        "step_during_dcp_save": ratio(steps[DURING_DCP], steps[PLAIN]),
        "writer_cores": result["writer_cores"][DURING],
        "nice_writer_cores": result["writer_cores"][DURING_NICE],
        "dcp_writer_cores": result["writer_cores"][DURING_DCP],
        "in_flight_seconds": result["in_flight_seconds"][DURING],
        "nice_in_flight_seconds": result["in_flight_seconds"][DURING_NICE],
        "dcp_in_flight_seconds": result["in_flight_seconds"][DURING_DCP],
    }
    rows = []
    for name, values in (stall | steps).items():
        milliseconds = [1e3 * value for value in values]
        rows.append([name, f"{median(milliseconds):.2f}", spread(milliseconds)])
    title = "Asynchronous save: stall, and steps beside it"
    report(args, {**result, "columns": ["ms", ""]}, title, rows, figures, TARGETS)


def work(args: argparse.Namespace) -> None:
    """**Collective.** One rank of the measurement."""
    import _io_peers as peers
    from _torch_peer import join_gloo
    from mpi4py import MPI

    from mpi_ckpt import Checkpointer

    comm, directory = MPI.COMM_WORLD, Path(args.dir)
    join_gloo(comm)
    state = zero_state(comm, args.mib)
    arrays = arrays_of(state)
    copies = {key: array.copy() for key, array in arrays.items()}
    tensors, kept = peers.dcp_state(arrays, comm.rank), peers.dcp_stager()
    committed = threading.Event()

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "commit":
            committed.set()

    step = 0
    with (
        Checkpointer(directory / "ours", comm, on_event=on_event) as plain,
        Checkpointer(directory / "nice", comm, on_event=on_event, background_nice=10) as nice,
    ):

        def begin(checkpointer: Checkpointer) -> Callable[[], bool]:
            nonlocal step
            step += 1
            committed.clear()
            checkpointer.save(step, state)
            return committed.is_set

        def end(checkpointer: Checkpointer) -> None:
            checkpointer.wait_until_finished()
            settle(comm, checkpointer.root / f"step_{step:08d}")

        def begin_dcp(keep: bool) -> Callable[[], bool]:
            nonlocal future
            future = peers.dcp_async_save(directory / "dcp", tensors, kept if keep else None)
            return future.done

        def end_dcp() -> None:
            future.result()
            settle(comm, directory / "dcp")

        future: Any = None

        def stall(start: Callable[[], Any], finish: Callable[[], None]) -> Callable[[int], float]:
            def measure(number: int) -> float:
                seconds = timed(comm, start)
                finish()
                return seconds

            return measure

        stalls = in_turns(
            args.rounds,
            {
                MEMCPY: lambda number: timed(comm, lambda: peers.copy_arrays(arrays, copies)),
                OURS: stall(lambda: begin(plain), lambda: end(plain)),
                DCP: stall(lambda: begin_dcp(False), end_dcp),
                DCP_KEPT: stall(lambda: begin_dcp(True), end_dcp),
            },
        )
        begin(nice)  # its first save touches its buffers
        end(nice)
        beside = StepsBeside(comm)
        steps = in_turns(
            args.rounds,
            {
                PLAIN: lambda number: beside.plain(),
                DURING: lambda number: beside.measure(DURING, lambda: begin(plain), lambda: end(plain)),
                DURING_NICE: lambda number: beside.measure(DURING_NICE, lambda: begin(nice), lambda: end(nice)),
                DURING_DCP: lambda number: beside.measure(DURING_DCP, lambda: begin_dcp(True), end_dcp),
            },
        )
    nbytes = comm.allreduce(sum(array.nbytes for array in arrays.values()))
    leave_result(
        comm,
        args.result,
        stall_seconds=stalls,
        step_seconds=steps,
        writer_cores=beside.writer_cores,
        in_flight_seconds=beside.in_flight_seconds,
        nbytes=nbytes,
    )


class StepsBeside:
    """A training loop, and what it and the other threads of its processes take while something is in flight."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi_ckpt.model.config import ModelConfig
        from mpi_ckpt.model.gpt import MiniGPT
        from mpi_ckpt.parallel.zero import ZeroOptimizer

        config = ModelConfig(**MODEL)
        self._comm = comm
        self._model = MiniGPT(config, BATCH)
        self._optimizer = ZeroOptimizer(comm, self._model.initial_parameters(0))
        noise = np.random.default_rng(comm.rank)
        self._tokens, self._targets = noise.integers(0, config.vocab_size, (2, BATCH, config.seq_len))
        self.writer_cores: dict[str, list[float]] = {}
        self.in_flight_seconds: dict[str, list[float]] = {}

    def plain(self) -> float:
        """**Collective.** Mean seconds of a step with nothing beside it."""
        steps = iter(range(PLAIN_STEPS))
        return self._loop(lambda: next(steps, None) is None)[0]

    def measure(self, name: str, begin: Callable[[], Callable[[], bool]], end: Callable[[], None]) -> float:
        """**Collective.** Mean seconds of a step from `begin`, which returns what tells the end, to that end."""
        seconds, in_flight, cores = self._loop(begin())
        end()
        self.writer_cores.setdefault(name, []).append(cores)
        self.in_flight_seconds.setdefault(name, []).append(in_flight)
        return seconds

    def _loop(self, over: Callable[[], bool]) -> tuple[float, float, float]:
        """**Collective.** Mean seconds a step until rank 0 sees that it is over, seconds in all, cores of others."""
        count, start, others = 0, time.perf_counter(), time.process_time() - time.thread_time()
        while not self._comm.bcast(over()):
            loss = self._model.loss_and_gradients(
                self._optimizer.params, self._tokens, self._targets, self._optimizer.grads
            )
            self._optimizer.step(1e-3, self._tokens.size, loss)
            count += 1
        seconds = time.perf_counter() - start
        others = time.process_time() - time.thread_time() - others
        return max(self._comm.allgather(seconds)) / max(count, 1), seconds, self._comm.allreduce(others) / seconds


if __name__ == "__main__":
    main()
