"""Cross-entropy straight from hidden states: the logits of the whole batch never exist."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, workspace_bytes: int
) -> Tensor:
    """Sum over valid labels of -log softmax(hidden @ weight^T)[label], an fp32 scalar.

    hidden [T, D] any float type, weight [V, D] fp32, labels [T] int64 with -100 where none. Rows
    without a label are skipped. Logits exist for a tile of rows at a time, sized by the workspace.
    """
    rows = (labels != IGNORED).nonzero()[:, 0]
    return _CrossEntropySum.apply(hidden[rows], weight, labels[rows], workspace_bytes)


class _CrossEntropySum(torch.autograd.Function):
    """Gradients are made in forward beside the loss: softmax is at hand, nothing is rebuilt."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, workspace_bytes):  # type: ignore[override]
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        wants_weight = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        step = max(1, workspace_bytes // (4 * weight.shape[0]))
        # One tile's room for all of them, and every pass in place: tiles are so large that the
        # system would give and take the memory of each, page by page.
        room = weight.new_empty(min(step, hidden.shape[0]), weight.shape[0])
        for low in range(0, hidden.shape[0], step):
            part, label = hidden[low : low + step].float(), labels[low : low + step, None]
            tile = torch.mm(part, weight.t(), out=room[: len(part)])
            tile.sub_(tile.amax(1, keepdim=True))
            picked = tile.gather(1, label)
            total = tile.exp_().sum(1, keepdim=True)
            loss += (total.log() - picked).sum()
            if not any(ctx.needs_input_grad):
                continue
            by_logit = tile.scatter_add_(1, label, -total)  # times total, as the rest of the tile
            grad_hidden[low : low + step] = (by_logit @ weight).div_(total).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(by_logit.t(), part / total)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        # The weight's gradient is scaled in place, a table-sized copy less: it serves only once.
        assert not getattr(ctx, "spent", False), "cross_entropy_sum has been differentiated already"
        ctx.spent = True
        by_weight = None if grad_weight is None else grad_weight.mul_(grad)
        return (grad_hidden * grad).to(grad_hidden.dtype), by_weight, None, None
