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
    grad_buffer: Tensor | None  # [U, head_dim] fp32, added to by backward


def project_rows(rows: EngramRows, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The tokens' rows, concatenated and cast to `dtype`, times weight^T: [T, out].

    weight [out, columns * head_dim]. Backward ADDS the rows' gradient into rows.grad_buffer, in the
    order of the reads: indexing a leaf would build a dense gradient per use, saturate in bf16 and
    depend on the thread count. The concatenated rows, wider than the hidden size, are gathered
    again instead of kept.
    """
    return _ProjectRows.apply(weight.to(dtype), rows)


class _ProjectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, rows: EngramRows) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(weight)
        ctx.rows = rows
        return _gathered(rows, weight.dtype) @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        rows: EngramRows = ctx.rows
        if rows.grad_buffer is not None:
            by_row = (grad @ weight).view(-1, rows.grad_buffer.shape[1]).float()
            rows.grad_buffer.index_add_(0, rows.inverse.flatten(), by_row)
        return grad.t() @ _gathered(rows, weight.dtype), None


def _gathered(rows: EngramRows, dtype: torch.dtype) -> Tensor:
    tokens = rows.inverse.flatten(0, -2).shape[0]
    return rows.values.index_select(0, rows.inverse.flatten()).view(tokens, -1).to(dtype)
