"""Load balancing of the experts: the choice is steered, the loss is left alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.moe.router import Router

RATE = 0.001


@torch.no_grad()
def balance_routers(model: nn.Module, counts: Tensor) -> None:
    """After an optimiser step: bias += 0.001 * sign(mean load - load), for every layer.

    counts: int64 [layers, experts], tokens given to each expert in the whole step, over all ranks
    and micro-batches; all are text tokens, so the bias of image tokens stays. Biases take no
    gradient and so belong to no optimiser.
    """
    load = counts.double()
    pushes = (load.mean(1, keepdim=True) - load).sign().float()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, push in zip(routers, pushes, strict=True):
        router.bias.add_(push, alpha=RATE)
