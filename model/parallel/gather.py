"""All columns' tensors on every rank, for what every query may look at."""

from __future__ import annotations

import torch
from torch import Tensor

from model.parallel.columns import Columns
from model.recompute import as_before


def gather(x: Tensor, columns: Columns, *, known: Tensor | None = None) -> Tensor:
    """[B * S / r, d] in the order of whole rows, from every rank's x [B * n / r, d].

    The gradient is the sum over ranks, made in fp32, of what each has found for our part.
    `known`: this result, from a first run of the same; then nothing is sent in forward. Every rank
    of the group makes the same calls, forward and backward, in the same order.
    """
    if not columns.divided:
        return x if known is None else as_before(x, known)
    return _Gather.apply(x, columns, known)  # pyright: ignore


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, columns, known):  # type: ignore[override]
        ctx.columns, ctx.dtype = columns, x.dtype
        if known is not None:
            return known
        by_rank = columns.group.all_gather(x).unflatten(1, (columns.stretches, -1))
        return by_rank.transpose(0, 1).flatten(0, 2)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        group, rows = ctx.columns.group, ctx.columns.stretches
        by_rank = grad.float().unflatten(0, (rows, group.size, -1)).transpose(0, 1)
        return group.reduce_scatter_sum(by_rank).flatten(0, 1).to(ctx.dtype), None, None
