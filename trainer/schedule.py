"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from trainer.config import OptimConfig


def learning_rate(step: int, optim: OptimConfig) -> float:
    """The rate of optimiser step `step`, counted from 1.

    Linear warm-up that reaches optim.lr at its last step, constant for hold_steps, half a cosine
    that reaches final_lr at its last step, final_lr from then on. decay_steps=0 never decays.
    Depends on nothing but its arguments, so a resumed run continues it by the step alone.
    """
    assert step >= 1, step
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    decayed = step - optim.warmup_steps - optim.hold_steps
    if decayed <= 0 or optim.decay_steps == 0:
        return optim.lr
    if decayed >= optim.decay_steps:
        return optim.final_lr
    cosine = 0.5 * (1.0 + math.cos(math.pi * decayed / optim.decay_steps))
    return optim.final_lr + (optim.lr - optim.final_lr) * cosine
