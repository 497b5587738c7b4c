"""AdamW on torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.shards import local_part


class AdamW:
    """Groups of parameters, their state, and the fused step; nothing else of an optimiser.

    torch.optim's class around the same kernel imports the compiler at its first use: 130 MB and
    about two seconds that a run without compilation does not need. `param_groups` and `state` look
    like those of torch.optim. Each group has "params", "weight_decay", "lr" and whatever names it.
    State is allocated at once, so it can be counted and loaded before the first step; it is placed
    as its parameter is. The kernel gets the parts that this rank holds, so one call may mix meshes.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.betas, self.eps = betas, eps
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for group in self.param_groups
            for parameter in group["params"]
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, in place."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in params]
            adamw(
                [local_part(p) for p in params],
                [local_part(p.grad) for p in params],
                [local_part(s["exp_avg"]) for s in states],
                [local_part(s["exp_avg_sq"]) for s in states],
                [],
                [s["step"] for s in states],
                fused=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                maximize=False,
            )

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
