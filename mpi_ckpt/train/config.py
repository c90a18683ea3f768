"""What a run is (settings, fixed at its first launch) and how a launch goes about it (options, free every time)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpi_ckpt.checkpoint.arguments import parse_bytes
from mpi_ckpt.checkpoint.cadence import Cadence, parse_duration
from mpi_ckpt.errors import ExplainedError, RemoteRefused
from mpi_ckpt.model.config import ModelConfig
from mpi_ckpt.storage.object_store import check_url
from mpi_ckpt.train.inject import Injection

EVAL_SAMPLES = 64  # held out by a run that evaluates and does not say how many
_BEFORE: dict[str, Any] = {"decay": "all", "clip_norm": 0.0}  # what runs did that could not say so


class ConfigError(ExplainedError, ValueError):
    """A setting, or a file that a setting names, cannot be used."""


@dataclass(frozen=True)
class Settings:
    """What the losses depend on. Stored with the run; a later launch takes them over, or must agree. See `--help`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    global_batch: int = 16
    seed: int = 0
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    param_dtype: str = "float16"
    token_noise: float = 0.0
    data: str | None = None
    corpus_tokens: int = 65536
    grad_accum: int = 1  # micro-batches a step
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    lr_min: float | None = None  # None: a tenth of lr
    lr_decay_steps: int | None = None  # None: not fixed yet, or a schedule without an end
    decay: str = "matrices"
    clip_norm: float = 1.0  # 0: no clipping
    eval_samples: int = 0  # held out of the training data
    overlap: bool = False  # a bucket of gradients may be summed in another order than all at once

    def __post_init__(self) -> None:
        _check("global_batch", self.global_batch, self.global_batch >= 1, "an integer of at least 1")
        _check("seed", self.seed, 0 <= self.seed < 2**63, "an integer from 0 to 2^63 - 1")
        _check("lr", self.lr, 0 < self.lr < math.inf, "a positive number")
        _check("beta1", self.beta1, 0 <= self.beta1 < 1, "a number from 0 to below 1")
        _check("beta2", self.beta2, 0 <= self.beta2 < 1, "a number from 0 to below 1")
        _check("eps", self.eps, 0 < self.eps < math.inf, "a positive number")
        _check("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "a number of at least 0")
        _check("param_dtype", self.param_dtype, self.param_dtype in ("float16", "float32"), "float16 or float32")
        _check("token_noise", self.token_noise, 0 <= self.token_noise < 1, "a probability below 1")
        _check("corpus_tokens", self.corpus_tokens, self.corpus_tokens >= 2, "an integer of at least 2")
        _check("grad_accum", self.grad_accum, self.grad_accum >= 1, "an integer of at least 1")
        _check("lr_schedule", self.lr_schedule, self.lr_schedule in ("constant", "cosine"), "constant or cosine")
        _check("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "an integer of at least 0")
        _check("lr_min", self.lr_min, 0 <= self.lowest_lr <= self.lr, f"a number from 0 to lr, which is {self.lr}")
        decay_steps = self.lr_decay_steps
        beyond = f"an integer above warmup_steps, which is {self.warmup_steps}"
        _check("lr_decay_steps", decay_steps, decay_steps is None or decay_steps > self.warmup_steps, beyond)
        _check("decay", self.decay, self.decay in ("matrices", "all"), "matrices or all")
        _check("clip_norm", self.clip_norm, 0 <= self.clip_norm < math.inf, "a number of at least 0")
        _check("eval_samples", self.eval_samples, self.eval_samples >= 0, "an integer of at least 0")

    @property
    def lowest_lr(self) -> float:
        """Where the cosine ends: GPT-3's tenth of lr (arXiv:2005.14165, appendix B) unless `lr_min` says otherwise."""
        return self.lr / 10 if self.lr_min is None else self.lr_min

    def completed(self, steps: int, *, evaluates: bool) -> Settings:
        """What a run that begins now stores: the settings that depend on its first launch, fixed for good.

        The cosine ends at the run's `steps` unless `lr_decay_steps` is given; a launch that evaluates holds out
        EVAL_SAMPLES unless `eval_samples` is given.
        """
        decay_steps = self.lr_decay_steps or (steps if self.lr_schedule == "cosine" else None)
        held_out = self.eval_samples or (EVAL_SAMPLES if evaluates else 0)
        return dataclasses.replace(self, lr_decay_steps=decay_steps, eval_samples=held_out)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: the model's sizes under 'model', the rest beside it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Settings:
        """The inverse of `to_json`. Raises TypeError or ValueError for anything else.

        A run that is older than a setting goes on as it began.
        """
        return cls(**(_BEFORE | stored | {"model": ModelConfig(**stored["model"])}))


@dataclass(frozen=True)
class Options:
    """How this launch goes about it."""

    run_dir: str | None = None
    resume: str = "auto"  # 'auto', 'never', or a step
    stop_at: int | None = None
    discard_later: bool = False
    on_damage: str = "raise"
    elastic: bool = False
    async_io: bool = True
    ckpt_every: str | None = "10steps"
    keep: int | None = 3
    log_every: int | None = None
    threads: int = 1
    tensor_parallel: int = 1  # ranks that share one model
    eval_every: int | None = None
    mtbf: str = "1d"  # mean time between failures, for a cadence of 'auto'
    guard: bool = True
    spike_factor: float = 2.0
    on_spike: str = "skip"
    max_rollbacks: int = 10
    inject: Sequence[str] = ()
    hang_timeout: str = "30min"  # or a number of seconds, 0 for off
    time_limit: str | None = None
    remote: str | None = None  # URL of the second tier
    remote_keep: int | None = None
    remote_bandwidth: str | None = None  # bytes a second and rank
    local: str | None = None  # directory on every node's own disk
    redundancy: str | None = None  # None: the engine's default, here and below
    local_keep: int | None = None
    shared_every: int | None = None  # saves

    def __post_init__(self) -> None:
        step = self.resume.isdecimal()
        _check("resume", self.resume, step or self.resume in ("auto", "never"), "auto, never, or a step")
        _check("stop_at", self.stop_at, self.stop_at is None or self.stop_at >= 1, "a step of at least 1")
        _check("on_damage", self.on_damage, self.on_damage in ("raise", "older"), "raise or older")
        _check("log_every", self.log_every, self.log_every is None or self.log_every >= 1, "at least 1")
        _check("threads", self.threads, self.threads >= 1, "at least 1")
        _check("spike_factor", self.spike_factor, 1 <= self.spike_factor < math.inf, "a number of at least 1")
        _check("on_spike", self.on_spike, self.on_spike in ("skip", "lower-lr", "stop"), "skip, lower-lr or stop")
        _check("max_rollbacks", self.max_rollbacks, self.max_rollbacks >= 0, "an integer of at least 0")
        tiers = {"local": ("redundancy", "local_keep", "shared_every"), "remote": ("remote_keep", "remote_bandwidth")}
        for tier, names in tiers.items():
            for name in names:
                alone = getattr(self, tier) is None and getattr(self, name) is not None
                _check(name, getattr(self, name), not alone, f"--{tier} beside it, the tier that it is about")
        alone = self.discard_later and self.resume_step is None
        _check("discard_later", "given", not alone, "--resume STEP beside it: what comes after which step?")
        for name in ("ckpt_every", "mtbf", "inject", "hang_timeout", "time_limit", "remote_bandwidth"):
            try:
                self._parsed(name)
            except ValueError as error:
                raise ConfigError(f"an option cannot be used: {error}", action="See --help.") from error
        if self.remote is not None:
            try:
                check_url(self.remote)
            except RemoteRefused as error:
                raise ConfigError(
                    f"remote cannot be used: {error.what}",
                    found=error.found,
                    expected=error.expected,
                    action=error.action,
                ) from error

    def _parsed(self, name: str) -> Any:
        """What the text of an option stands for. Raises ValueError."""
        text = getattr(self, name)
        if name == "inject":
            return [Injection.parse(injection) for injection in text]
        if name == "ckpt_every":
            return Cadence.parse(text, name="ckpt_every")
        if text is None:
            return None
        if name == "remote_bandwidth":
            return parse_bytes(name, text)
        if name == "hang_timeout" and text.replace(".", "", 1).isdecimal():
            return float(text)
        return parse_duration(name, text)

    @property
    def injections(self) -> list[Injection]:
        """The faults to inject."""
        found: list[Injection] = self._parsed("inject")
        return found

    @property
    def hang_seconds(self) -> float:
        """Seconds without progress that end the job; 0 for never."""
        return float(self._parsed("hang_timeout"))

    @property
    def remote_bytes_per_second(self) -> int | None:
        """What a rank may upload in a second; None for as much as goes."""
        nbytes: int | None = self._parsed("remote_bandwidth")
        return nbytes

    @property
    def time_limit_seconds(self) -> float | None:
        """Seconds after which this launch has to be over."""
        seconds: float | None = self._parsed("time_limit")
        return seconds

    @property
    def resume_step(self) -> int | None:
        """The step that was asked for by number."""
        return int(self.resume) if self.resume.isdecimal() else None


def resolve(explicit: dict[str, Any], stored: Settings | None, ranks: int) -> Settings:
    """The settings of the run: what is given explicitly, else what is stored, else the default.

    `explicit` holds the settings on the command line, the model's sizes among them; 'batch' stands for a global batch
    of as much a rank. Raises ConfigError for an explicit value that is not the stored one.
    """
    explicit = dict(explicit)
    if "batch" in explicit:
        explicit["global_batch"] = explicit.pop("batch") * ranks
    base = stored or Settings(global_batch=4 * ranks)
    sizes = {f.name for f in dataclasses.fields(ModelConfig)}
    if stored is not None:
        known = stored.to_json() | stored.to_json()["model"]
        for name, value in explicit.items():
            # The data may have moved; their content is compared when they are opened.
            if name != "data" and value != known[name]:
                raise ConfigError(
                    f"{name} is not what this run was started with",
                    found=value,
                    expected=known[name],
                    action="Leave it out or give the stored value; a run with other settings needs another directory.",
                )
    try:
        model = dataclasses.replace(base.model, **{k: v for k, v in explicit.items() if k in sizes})
    except ValueError as error:
        raise ConfigError(f"the model cannot be built: {error}", action="Change one of the sizes.") from error
    return dataclasses.replace(base, model=model, **{k: v for k, v in explicit.items() if k not in sizes})


def _check(name: str, value: object, good: bool, expected: str) -> None:
    if not good:
        raise ConfigError(f"{name} cannot be used", found=repr(value), expected=expected, action="See --help.")
