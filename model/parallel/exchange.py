"""Rows that travel to other ranks, and their gradients that travel back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.parallel.group import Group


def exchange(x: Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """`Group.all_to_all_rows` with a gradient.

    Every rank of the group makes the same calls, forward and backward, in the same order; a rank
    without rows too.
    """
    return _Exchange.apply(x, group, send, receive)  # pyright: ignore


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, send, receive):  # type: ignore[override]
        ctx.fixed = group, send, receive
        return group.all_to_all_rows(x, send=send, receive=receive)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        group, send, receive = ctx.fixed
        return group.all_to_all_rows(grad, send=receive, receive=send), None, None, None
