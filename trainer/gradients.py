"""The size of a step's gradient, measured and limited."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.ranks import Ranks


@dataclass(frozen=True)
class Gradient:
    """A rank's local part of one gradient.

    copies: how many ranks hold each of its elements, equal on all of them, so that a sum over
    ranks of 1/copies counts every element once.
    """

    local: Tensor
    copies: int = 1


def parameter_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> list[Gradient]:
    """The local gradients of parameters that have one: shards of DTensors, copies of the rest."""
    found = []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            mesh = grad.device_mesh
            shards = math.prod(
                mesh.size(dim) for dim, place in enumerate(grad.placements) if place.is_shard()
            )
            found.append(Gradient(grad.to_local(), ranks.world // shards))
        elif grad is not None:
            found.append(Gradient(grad, ranks.world))
    return found


def gradient_norm(gradients: Sequence[Gradient], ranks: Ranks) -> float:
    """L2 norm over all gradients of all ranks, each element counted once.

    Each tensor's norm is taken in fp32; their squares are summed in fp64, in a fixed order.
    Not finite when any element of any rank is not.
    """
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient.local, dtype=torch.float32)
        total += norm.double().square().cpu() / gradient.copies
    return math.sqrt(ranks.all_reduce_sum(total).item())


def clip(gradients: Sequence[Gradient], *, norm: float, limit: float) -> None:
    """Scale all gradients in place so that their norm, known to be `norm`, is at most `limit`."""
    if norm > limit:
        torch._foreach_mul_([gradient.local for gradient in gradients], limit / norm)
