"""The command line: flags into explicit settings and options. The help text is the reference of both."""

from __future__ import annotations

import argparse
from typing import Any

from mpi_ckpt.train.config import Options

PROGRAM = "python -m mpi_ckpt.train"


def parse(argv: list[str] | None) -> tuple[dict[str, Any], int | None, Options]:
    """The settings given explicitly, the number of steps if given, and the options. Raises SystemExit for bad usage."""
    given = vars(_parser().parse_args(argv))
    steps = given.pop("steps")
    names = Options.__dataclass_fields__
    options = Options(**{name: given.pop(name) for name in names})
    return {name: value for name, value in given.items() if value is not None}, steps, options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"mpirun -n RANKS {PROGRAM}",
        description="Train MiniGPT on MPI ranks (data parallel, ZeRO-1), with sharded checkpoints and exact resume.",
        epilog="Settings (model, data, optimizer) belong to the run: they are stored at its first launch. A later one "
        "in the same directory takes them over; one that is given again must be equal.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--run-dir", metavar="DIR", help="directory of the run (default: a new runs/<time>)")
    run.add_argument("--steps", type=_positive, help="steps of the whole run (default 20, or what is stored)")
    run.add_argument("--stop-at", type=_positive, metavar="STEP", help="checkpoint after STEP and exit")
    run.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|STEP",
        help="auto: continue from the newest committed step, or start; never: refuse a directory that holds a run; "
        "STEP: continue from that step (default auto)",
    )
    run.add_argument("--discard-later", action="store_true", help="with --resume STEP: delete the steps after STEP")
    run.add_argument(
        "--on-damage",
        choices=("raise", "older"),
        default="raise",
        help="when the newest step is damaged: stop, or set it aside and take the one before (default raise)",
    )
    run.add_argument("--elastic", action="store_true", help="resume a checkpoint of any number of ranks")
    save = parser.add_argument_group("checkpoints")
    save.add_argument(
        "--ckpt-every",
        default="10steps",
        metavar="CADENCE",
        help="'10steps', '30s', '10min' or 'auto' (default 10steps); the last step is always saved",
    )
    save.add_argument(
        "--keep", type=_positive, default=3, metavar="K", help="how many of the newest steps stay (default 3)"
    )
    save.add_argument(
        "--remote",
        metavar="URL",
        help="upload every checkpoint in the run's directory (with --local: those that go there) in the background: "
        "s3://bucket/prefix or file:///dir, one URL a run",
    )
    save.add_argument("--remote-keep", type=_positive, metavar="K", help="newest steps that stay there (default: all)")
    save.add_argument(
        "--remote-bandwidth",
        metavar="SIZE",
        help="bytes a second and rank that an upload takes at most: '50MB', '1GiB' (default: as fast as it goes)",
    )
    save.add_argument(
        "--local",
        metavar="DIR",
        help="save every checkpoint on every node's own disk, in DIR/<name of the run's directory>; {domain} in DIR "
        "stands for the failure domain: the node's name, or what MPI_CKPT_DOMAIN says",
    )
    save.add_argument("--redundancy", metavar="SCHEME", help="of --local: single, partner, xor or rs:k+m (default xor)")
    save.add_argument("--local-keep", type=_positive, metavar="K", help="newest steps there (default 2)")
    save.add_argument(
        "--shared-every",
        type=_positive,
        metavar="N",
        help="with --local: every Nth checkpoint, and a launch's last, goes to the run's directory too (default 10)",
    )
    save.add_argument(
        "--async-io",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write while training goes on (default), or wait for every checkpoint",
    )
    save.add_argument(
        "--mtbf", default="1d", metavar="TIME", help="mean time between failures, for --ckpt-every auto (default 1d)"
    )
    guard = parser.add_argument_group("divergence")
    guard.add_argument(
        "--guard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go back to a checkpoint when a loss or gradient is not finite, or the loss spikes (default); --no-guard: "
        "stop when one is not finite",
    )
    guard.add_argument(
        "--spike-factor",
        type=float,
        default=2.0,
        metavar="F",
        help="a spike: F times the median of the last 20 losses, and 0.5 above it (default 2)",
    )
    guard.add_argument(
        "--on-spike",
        choices=("skip", "lower-lr", "stop"),
        default="skip",
        help="after going back, skip the samples up to the rejected step (default), or train on them with half the "
        "learning rate; or do not go back, stop",
    )
    guard.add_argument(
        "--max-rollbacks", type=int, default=10, metavar="N", help="stop at the next one, in all launches (default 10)"
    )
    model = parser.add_argument_group("model (settings)")
    model.add_argument("--n-layer", type=int, help="transformer blocks (default 2)")
    model.add_argument("--n-embd", type=int, help="width (default 32)")
    model.add_argument("--n-head", type=int, help="attention heads (default 4)")
    model.add_argument("--vocab-size", type=int, help="tokens in the vocabulary (default 64)")
    model.add_argument("--seq-len", type=int, help="tokens a sample (default 16)")
    model.add_argument("--param-dtype", choices=("float16", "float32"), help="of the parameters (default float16)")
    data = parser.add_argument_group("data (settings)")
    data.add_argument(
        "--data", metavar="FILE", help="raw text (bytes), or uint16 tokens in a .bin (default: synthetic)"
    )
    data.add_argument("--corpus-tokens", type=int, help="length of the synthetic corpus (default 65536)")
    batch = data.add_mutually_exclusive_group()
    batch.add_argument("--global-batch", type=int, help="samples a step, over all ranks")
    batch.add_argument("--batch", type=int, help="samples a step for each data-parallel rank (default 4)")
    data.add_argument(
        "--grad-accum",
        type=int,
        metavar="K",
        help="micro-batches that each rank splits its samples of a step into "
        "(default 1); their gradients are summed and reduced once a step",
    )
    data.add_argument(
        "--eval-samples",
        type=_positive,
        metavar="N",
        help="hold out the last N samples of the data: no step trains on them (default 64 if the first launch has "
        "--eval-every, else 0)",
    )
    data.add_argument("--token-noise", type=float, help="probability that an input token is replaced (default 0)")
    optimizer = parser.add_argument_group("optimizer (settings)")
    optimizer.add_argument("--seed", type=int, help="of initial values, corpus, order and noise (default 0)")
    optimizer.add_argument("--lr", type=float, help="learning rate (default 3e-3)")
    optimizer.add_argument("--lr-schedule", choices=("constant", "cosine"), help="after the warm-up (default constant)")
    optimizer.add_argument(
        "--warmup-steps", type=int, metavar="N", help="steps over which the learning rate rises to --lr (default 0)"
    )
    optimizer.add_argument("--lr-min", type=float, help="where the cosine ends (default a tenth of --lr)")
    optimizer.add_argument(
        "--lr-decay-steps",
        type=int,
        metavar="N",
        help="step at which it ends (default --steps of the first launch: another --steps later does not move it)",
    )
    optimizer.add_argument(
        "--clip-norm", type=float, metavar="X", help="largest norm of the mean gradient, 0 for any (default 1)"
    )
    optimizer.add_argument("--beta1", type=float, help="AdamW beta1 (default 0.9)")
    optimizer.add_argument("--beta2", type=float, help="AdamW beta2 (default 0.95)")
    optimizer.add_argument("--eps", type=float, help="AdamW eps (default 1e-8)")
    optimizer.add_argument("--weight-decay", type=float, help="AdamW weight decay (default 0.1)")
    optimizer.add_argument(
        "--decay",
        choices=("matrices", "all"),
        help="what decays: weights and embeddings but no bias or LayerNorm gain (default), or every parameter (runs "
        "begun before this setting)",
    )
    optimizer.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="sum gradients over the ranks in buckets, while the backward computes the others (default no: all at once "
        "after it); last bits of the sums differ, so this is the run's",
    )
    machine = parser.add_argument_group("this launch")
    machine.add_argument(
        "--tensor-parallel",
        type=_positive,
        default=1,
        metavar="T",
        help="share the model over T neighbouring ranks: heads and hidden units of every block; the other ranks are "
        "data parallel. A checkpoint of another T needs --elastic (default 1)",
    )
    machine.add_argument("--log-every", type=_positive, metavar="N", help="print every Nth step (default: 20 rows)")
    machine.add_argument(
        "--eval-every",
        type=_positive,
        metavar="E",
        help="evaluate on the held-out samples every E steps and at the end (default: at the end only)",
    )
    machine.add_argument(
        "--time-limit",
        metavar="TIME",
        help="'30min': checkpoint and leave in time, with status 75 (default: the end of the Slurm job, if known)",
    )
    machine.add_argument(
        "--hang-timeout",
        default="30min",
        metavar="TIME",
        help="without progress for so long, leave with status 77; longer than the longest evaluation, 0 for never "
        "(default 30min)",
    )
    machine.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="for trying things out, once a run: lr-spike:STEP:FACTOR, nan:STEP:RANK, kill:STEP:RANK, hang:STEP:RANK",
    )
    machine.add_argument("--threads", type=_positive, default=1, help="BLAS threads a rank (default 1)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer of at least 1")
    return int(text)
