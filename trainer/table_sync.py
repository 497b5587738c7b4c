"""One gradient of the Engram tables out of what every rank has collected."""

from __future__ import annotations

import torch

from model.engram.primaries import TableGradients
from model.engram.store import Window
from trainer.ranks import Ranks


def collect_table_gradients(window: Window, ranks: Ranks) -> TableGradients:
    """Sum the window's row gradients over the ranks, in rank order; each row appears once.

    Only rows that some rank has read travel: 8 bytes an id and 4 * head_dim a gradient. Frozen
    tables have none.
    """
    if not window.grads:
        return TableGradients([], [])
    if ranks.world == 1:
        return TableGradients(window.ids, window.grads)
    out = TableGradients([], [])
    for ids, grad in zip(window.ids, window.grads, strict=True):
        every_id = torch.cat(ranks.all_gather_rows(ids))
        every_grad = torch.cat(ranks.all_gather_rows(grad))
        union, inverse = torch.unique(every_id, return_inverse=True)
        total = grad.new_zeros(len(union), grad.shape[1]).index_add_(0, inverse, every_grad)
        out.ids.append(union)
        out.grads.append(total)
    return out
