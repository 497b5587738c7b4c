"""What the rules with one momentum buffer have in common: their parameters and their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class MomentumRule:
    """One group of parameters, and fp32 "momentum" for each, placed as the parameter is.

    `param_groups` and `state` look like those of `trainer.adamw.AdamW`; subclasses add step().
    """

    def __init__(self, rule: str, named: Sequence[tuple[str, Tensor]], *, lr: float) -> None:
        self.group: dict[str, Any] = {
            "name": rule,
            "params": [tensor for _, tensor in named],
            "param_names": [name for name, _ in named],
            "lr": lr,
        }
        self.param_groups = [self.group]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            tensor: {"momentum": torch.zeros_like(tensor, dtype=torch.float32)}
            for _, tensor in named
        }

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in self.group["params"]:
            tensor.grad = None
