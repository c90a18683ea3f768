"""The learning rate of a step: a pure function of the settings and the step, so that a resumed run cannot differ."""

from __future__ import annotations

import math

from mpi_ckpt.train.config import Settings


def learning_rate(settings: Settings, step: int) -> float:
    """**Local.** The learning rate of `step`, counted from 1.

    Up to `warmup_steps` (w) it rises linearly: lr step / w. Then it is lr (`constant`) or follows half a cosine down to
    `lr_min`, which it reaches at step `lr_decay_steps` (d) and keeps (`cosine`): the schedule of GPT-3
    (arXiv:2005.14165, appendix B); the cosine is equation 5 of arXiv:1608.03983 without restarts:

        lr_min + (lr - lr_min) (1 + cos(pi (step - w) / (d - w))) / 2
    """
    warmup, peak = settings.warmup_steps, settings.lr
    if step < warmup:
        return peak * step / warmup
    if settings.lr_schedule == "constant":
        return peak
    lowest, decay = settings.lowest_lr, settings.lr_decay_steps
    if decay is None:
        raise ValueError("lr_decay_steps: found None; expected a number of steps, as Settings.completed gives one")
    if step >= decay:
        return lowest
    return lowest + (peak - lowest) * (1.0 + math.cos(math.pi * (step - warmup) / (decay - warmup))) / 2.0
