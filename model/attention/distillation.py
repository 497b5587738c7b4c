"""Teaching the indexer: its scores over the selected entries should rank them as attention does.

Of every query, KL(target || softmax(scores over its selected entries)), where the target is what
the layer's attention heads together give those entries, scaled to sum to 1. Everything that comes
in from the rest of the model is detached, so nothing but the indexer learns from it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from model.attention.indexer import weighted
from model.config import ModelConfig


def distilled_queries(config: ModelConfig, *, seq_ids: Tensor, position_ids: Tensor) -> int:
    """How many terms the divergence of a micro-batch has: one for each index source and each token
    that sees an entry there; both tensors as in `ModelInputs`."""
    sources = [n for n in range(config.num_hidden_layers) if config.selects(n)]
    seen = [(seq_ids > 0) & (position_ids + 1 >= config.ratio(n)) for n in sources]
    return sum(int(some.sum()) for some in seen)


def selection_divergence(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    selected: Tensor,
    mass: Tensor,
    *,
    workspace_bytes: int,
) -> Tensor:
    """The sum over queries of KL(target || softmax(index scores)): fp32 scalar, in nats.

    Index queries q [T, heads, dim], head weights [T, heads] and keys [G, dim] take gradient;
    selected [T, K] int64 (-1 where absent) and mass [T, K] fp32 (>= 0, not scaled) do not. A query
    without selected entries, or whose heads give them nothing, contributes 0. The scores are those
    that selected, step by step in the activations' dtype; the divergence is fp32. Keys are gathered
    for a tile of queries at a time, so temporary memory is bounded by the workspace.
    """
    return _Divergence.apply(q, weights, keys, selected, mass, workspace_bytes)  # pyright: ignore


class _Divergence(torch.autograd.Function):
    """Keeps the gradient by score [T, K]; products with keys are made again in backward."""

    @staticmethod
    def forward(ctx, q, weights, keys, selected, mass, workspace_bytes):  # type: ignore[override]
        loss = mass.new_zeros(())
        by_score = torch.empty_like(mass)
        for low, high in _tiles(q, selected, workspace_bytes):
            chosen, tile_mass = selected[low:high], mass[low:high]
            near = _gathered(keys, chosen)
            scores = weighted(torch.bmm(q[low:high], near.mT), weights[low:high]).float()
            log_p = torch.log_softmax(scores.masked_fill_(chosen < 0, -torch.inf), dim=-1)
            total = tile_mass.sum(-1, keepdim=True)
            target = tile_mass / total.masked_fill(total == 0, 1.0)
            # Only where the target is: elsewhere stand 0 * -inf, and NaN where all is absent.
            each = torch.where(target > 0, target * (target.log() - log_p), 0.0)
            loss += each.sum()
            difference = log_p.exp_().sub_(target)
            by_score[low:high] = difference.masked_fill_((chosen < 0) | (total == 0), 0.0)
        ctx.save_for_backward(q, weights, keys, selected, by_score)
        ctx.workspace_bytes = workspace_bytes
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        q, weights, keys, selected, by_score = ctx.saved_tensors
        grad_q, grad_weights = torch.empty_like(q), torch.empty_like(weights)
        grad_keys = torch.zeros_like(keys, dtype=torch.float32)
        for low, high in _tiles(q, selected, ctx.workspace_bytes):
            near = _gathered(keys, selected[low:high])
            products = torch.bmm(q[low:high], near.mT).float().relu_()
            by = by_score[low:high] * grad
            grad_weights[low:high] = torch.bmm(products, by[:, :, None])[:, :, 0]
            by_product = products.sign_().mul_(weights[low:high, :, None]).mul_(by[:, None])
            grad_q[low:high] = torch.bmm(by_product, near.float())
            by_near = torch.bmm(by_product.mT, q[low:high].float())
            # Absent entries point at row 0 with an exact zero.
            index = selected[low:high].clamp_min(0).flatten()
            grad_keys.index_add_(0, index, by_near.flatten(0, 1))
        return grad_q, grad_weights, grad_keys.to(keys.dtype), None, None, None


def _gathered(keys: Tensor, chosen: Tensor) -> Tensor:
    """[Q, K, dim]; any row where absent."""
    rows = keys.index_select(0, chosen.clamp_min(0).flatten())
    return rows.view(*chosen.shape, keys.shape[1])


def _tiles(q: Tensor, selected: Tensor, workspace_bytes: int) -> Iterator[tuple[int, int]]:
    """Query ranges whose temporaries in backward fit the workspace."""
    tokens, heads, dim = q.shape
    per_query = selected.shape[1] * 4 * (3 * dim + 4 * heads + 4)
    rows = max(1, workspace_bytes // per_query)
    return ((low, min(low + rows, tokens)) for low in range(0, tokens, rows))
