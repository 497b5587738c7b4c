"""Table rows of one micro-batch, already fetched, and the one place their gradients gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EngramRows:
    """One Engram layer's rows for one micro-batch of a window.

    `values` and `grad_buffer` belong to the whole window, one row per distinct table row, so a row
    that is read often travels once. The model never touches the table.
    """

    values: Tensor  # [U, head_dim], in the table's dtype
    inverse: Tensor  # [B, S, columns] int64: where each read's row stands in `values`
    grad_buffer: Tensor  # [U, head_dim] fp32, added to by backward


def look_up(values: Tensor, inverse: Tensor, grad_buffer: Tensor) -> Tensor:
    """values[inverse] as [T, columns * head_dim]; backward ADDS into grad_buffer.

    Indexing a leaf would build a dense gradient per use, saturate in bf16 and depend on the thread
    count; here each use adds into one fp32 buffer, in the order of the reads.
    """
    # Backward runs only if some input wants a gradient; `values` itself never receives one.
    return _LookUp.apply(values.detach().requires_grad_(), inverse, grad_buffer)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, inverse: Tensor, grad_buffer: Tensor):  # type: ignore[override]
        ctx.inverse, ctx.grad_buffer = inverse, grad_buffer
        return values.index_select(0, inverse.flatten()).view(inverse.shape[0], -1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        buffer = ctx.grad_buffer
        rows = grad.reshape(-1, buffer.shape[1]).float()
        buffer.index_add_(0, ctx.inverse.flatten(), rows)
        return None, None, None
