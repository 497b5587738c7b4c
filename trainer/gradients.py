"""The size of a step's gradient, measured and limited."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.ranks import Ranks, is_sharded

BLOCK = 512


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
        if is_sharded(grad):
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

    Not finite when any element of any rank is not.
    """
    squares: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        own = _squared_norm(gradient.local) / gradient.copies
        squares.setdefault(own.device, []).append(own)
    total = torch.zeros((), dtype=torch.float64)
    for found in squares.values():
        total += torch.stack(found).sum().cpu()
    return math.sqrt(ranks.all_reduce_sum(total).item())


def _squared_norm(tensor: Tensor) -> Tensor:
    """fp32 norms of blocks, their squares summed in fp64: fp64 scalar.

    torch adds up a whole fp32 tensor in a few running sums: at 16 million elements its norm is
    wrong in the fourth digit and depends on the threads, while blocks cost no more.
    """
    flat = tensor.reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return blocks.double().square().sum() + rest.double().square()


def clip(gradients: Sequence[Gradient], *, norm: float, limit: float) -> None:
    """Scale all gradients in place so that their norm, known to be `norm`, is at most `limit`."""
    if norm > limit:
        for gradient in gradients:
            gradient.local.mul_(limit / norm)
