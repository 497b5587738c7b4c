"""Muon: momentum, orthogonalised, for every matrix that the model multiplies by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

MOMENTUM = 0.95
SCALE = 0.18  # gives an update the size that AdamW's usually have
WEIGHT_DECAY = 0.1
# Newton-Schulz coefficients: eight steps that grow small singular values fast, two that settle
# all of them at one.
FAST, SETTLE = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
STEPS = (FAST,) * 8 + (SETTLE,) * 2


def muon_step(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float,
    blocks: Sequence[int],
) -> None:
    """One step in place: M = 0.95 M + G; W -= lr * (0.18 sqrt(max(n, m)) * NS(0.95 M + G) + wd W).

    weight, momentum and grad [..., rows, columns]: leading dimensions stack matrices. blocks: how
    the rows of each matrix divide into matrices of their own [n, m] (heads, groups), summing up to
    `rows`; (rows,) for none.
    """
    momentum.mul_(MOMENTUM).add_(grad)
    nesterov = torch.add(grad, momentum, alpha=MOMENTUM)
    weight.mul_(1 - lr * weight_decay)
    for target, part in _stacks(weight, nesterov, blocks):
        size = max(part.shape[-2:]) ** 0.5 * SCALE
        target.add_(orthogonalised(part), alpha=-lr * size)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of [..., n, m] with its singular values brought near one (a zero matrix stays zero).

    Newton-Schulz: X <- a X + (b A + c A^2) X with A = X X^T, from X of Frobenius norm one.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    norm = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / torch.where(norm > 0, norm, 1.0)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def _stacks(
    weight: Tensor, update: Tensor, blocks: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of runs of equal blocks, [..., count, n, m], so that they go through in one batch."""
    assert sum(blocks) == weight.shape[-2]
    first = at = 0
    while first < len(blocks):
        last = first
        while last < len(blocks) and blocks[last] == blocks[first]:
            last += 1
        high = at + blocks[first] * (last - first)
        shape = (last - first, blocks[first])
        yield (
            weight[..., at:high, :].unflatten(-2, shape),
            update[..., at:high, :].unflatten(-2, shape),
        )
        first, at = last, high
