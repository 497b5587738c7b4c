"""The sequence-level balance loss of the routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from model.layout import Documents
from model.tally import tally

SMALLEST_SUM = 1e-20


def balance_sum(scores: Tensor, experts: Tensor, documents: Documents) -> Tensor:
    """Sum over documents of T * sum_i f_i P_i, an fp32 scalar, for one layer.

    scores [T, E] fp32, experts [T, k] int64 (E on padding). In a document of T tokens,
    f_i = E / (k T) * (slots given to expert i) and P_i is the mean over its tokens of the scores
    divided by their sum. Evenly used experts give T. The gradient passes through P alone. Divided
    by a step's tokens it is the mean over documents weighted by their tokens, however they are
    packed and spread over micro-batches and ranks. Where a group of ranks has divided the documents
    f is that of whole ones, and the ranks' results are to be summed.
    """
    count, width, k = len(documents.lengths), scores.shape[1], experts.shape[1]
    place = documents.index[:, None] * (width + 1) + experts
    slots = tally(place, size=(count + 1) * (width + 1))
    slots = documents.group.all_reduce_sum(slots)
    share = slots.view(count + 1, width + 1)[:, :width].float() * (width / k)
    share[:count] /= documents.lengths[:, None]
    # The last row is that of padding, whose slots are all in the column cut off: it is zero.
    return _Balance.apply(scores, share, documents.index)


class _Balance(torch.autograd.Function):
    """sum_t sum_i share[index_t, i] * scores[t, i] / sum_j scores[t, j]. Keeps two
    numbers a token and the shares of each document."""

    @staticmethod
    def forward(ctx, scores: Tensor, share: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        total = scores.sum(-1) + SMALLEST_SUM
        mean = (scores * share.index_select(0, index)).sum(-1) / total
        ctx.save_for_backward(share, index, total, mean)
        return mean.sum()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        share, index, total, mean = ctx.saved_tensors
        by_score = share.index_select(0, index).sub_(mean[:, None])
        return by_score.mul_((grad / total)[:, None]), None, None
