"""Load balancing of the experts by bias: the choice is steered, the loss is left alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.moe.router import Router


@torch.no_grad()
def balance_routers(model: nn.Module, counts: Tensor, *, rate: float) -> None:
    """After an optimiser step: bias += rate * sign(mean load - load), for every layer.

    counts: int64 [layers, 2, experts], text and image tokens given to each expert in the whole
    step, over all ranks and micro-batches. Text moves `bias`, images `bias_vl`; without tokens of a
    kind its mean and its loads are all 0 and nothing moves. Biases take no gradient and so belong
    to no optimiser.
    """
    load = counts.double()
    pushes = (load.mean(-1, keepdim=True) - load).sign().float()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router, (text, image) in zip(routers, pushes, strict=True):
        router.bias.add_(text, alpha=rate)
        router.bias_vl.add_(image, alpha=rate)
