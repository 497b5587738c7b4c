"""The routed experts of one rank over token rows, a few experts at a time.

The rows and pre-activations of a group of experts live only while it runs; backward makes them
again, unless one group takes all. What becomes of a group's results is the caller's affair, who
adds them to its own tokens or sends them to another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.moe.grouped import Span, by_expert, put_outer, spans
from model.moe.router import Routing
from model.moe.swiglu import swiglu, swiglu_backward


class Slots(NamedTuple):
    """The S token slots that consecutive experts run, in expert order."""

    row: Tensor  # [S] int64, which of the token rows
    weight: Tensor  # [S] fp32, routing weight
    first: int  # expert
    sizes: list[int]  # slots of expert first, first + 1, ...


class ExpertWeights(NamedTuple):
    """w13 [E, 2I, D] and w2 [E, D, I] in the type of the token rows, and what bounds the
    temporaries of one group."""

    w13: Tensor
    w2: Tensor
    limit: float
    workspace_bytes: int

    @property
    def most_slots(self) -> int:
        """What the workspace has room for: backward's temporaries are four rows of width D and, in
        fp32, about five of width 2I."""
        return max(1, self.workspace_bytes // (4 * (4 * self.w13.shape[2] + 5 * self.w13.shape[1])))


class Kept(NamedTuple):
    """Of the one group that has taken all slots."""

    rows: Tensor  # [S, D]
    both: Tensor  # [S, 2I], gate and up


def run_forward(
    x: Tensor, slots: Slots, experts: ExpertWeights, *, put: Callable[[Span, Tensor], None]
) -> Kept | None:
    """Each slot's output, times its routing weight, of x [T, D]: put(span, [n, D]) per group."""
    kept = None
    for span in spans(slots.first, slots.sizes, most=experts.most_slots):
        rows = x.index_select(0, slots.row[span.rows])
        both = by_expert(rows, experts.w13.mT, span)
        hidden = swiglu(both, experts.limit, slots.weight[span.rows])
        put(span, by_expert(hidden, experts.w2.mT, span))
        if len(span.sizes) == len(slots.sizes):
            kept = Kept(rows, both)
    return kept


def run_backward(
    x: Tensor | None,
    grad: Tensor,
    slots: Slots,
    experts: ExpertWeights,
    *,
    by_w13: Tensor,
    by_w2: Tensor,
    put: Callable[[Span, Tensor, Tensor], None],
    kept: Kept | None = None,
) -> None:
    """put(span, gradient of the slots' rows [n, D], that of their weights [n] fp32) per group; the
    gradients of the experts' weights are written to by_w13 and by_w2.

    grad [T, D] is that of each token's sum. x is not read where `kept` is given.
    """
    for span in spans(slots.first, slots.sizes, most=experts.most_slots):
        if kept is not None:
            rows, both = kept
        else:
            assert x is not None
            rows = x.index_select(0, slots.row[span.rows])
            both = by_expert(rows, experts.w13.mT, span)
        by_y = grad.index_select(0, slots.row[span.rows])
        weight = slots.weight[span.rows]
        by_hidden = by_expert(by_y, experts.w2, span)
        found = swiglu_backward(by_hidden, both, experts.limit, weight)
        assert found.by_weight is not None
        put_outer(by_w2, by_y, found.hidden, span)
        put_outer(by_w13, found.by_both, rows, span)
        put(span, by_expert(found.by_both, experts.w13, span), found.by_weight)


class RoutedExperts(torch.autograd.Function):
    """All experts on this rank. The sum over a token's k experts is fp32, in the order of expert
    numbers."""

    @staticmethod
    def forward(ctx, x, weights, w13, w2, known, routing, settings):  # type: ignore[override]
        slots, ctx.slot = _sort(routing, weights)
        ctx.save_for_backward(x, w13, w2)
        ctx.slots, ctx.settings, ctx.shape = slots, settings, weights.shape
        ctx.kept = None
        if known is not None:
            return known
        out = torch.zeros_like(x, dtype=torch.float32)

        def put(span: Span, y: Tensor) -> None:
            out.index_add_(0, slots.row[span.rows], y.float())

        ctx.kept = run_forward(x, slots, ExpertWeights(w13, w2, *settings), put=put)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w13, w2 = ctx.saved_tensors
        slots = ctx.slots
        by_w13, by_w2 = torch.empty_like(w13), torch.empty_like(w2)
        by_weights = slots.weight.new_zeros(ctx.shape)
        by_x = torch.zeros_like(x, dtype=torch.float32)

        def put(span: Span, by_row: Tensor, by_weight: Tensor) -> None:
            by_weights.view(-1)[ctx.slot[span.rows]] = by_weight
            by_x.index_add_(0, slots.row[span.rows], by_row.float())

        experts = ExpertWeights(w13, w2, *ctx.settings)
        run_backward(x, grad, slots, experts, by_w13=by_w13, by_w2=by_w2, put=put, kept=ctx.kept)
        return by_x.to(x.dtype), by_weights, by_w13, by_w2, None, None, None


def _sort(routing: Routing, weights: Tensor) -> tuple[Slots, Tensor]:
    """The slots of all tokens but padding in expert order, and each one's place in weights [T, k],
    flattened."""
    sizes = routing.counts.sum(0).tolist()
    slot = torch.argsort(routing.experts.flatten(), stable=True)[: sum(sizes)]
    return Slots(slot // weights.shape[1], weights.flatten()[slot], 0, sizes), slot
