"""Routed and shared SwiGLU experts with a clamp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.layout import Documents
from model.moe.router import Router, Routing
from model.parallel.group import Group

# Matrix libraries take other kernels for very few rows, with other roundings: a token's bits would
# depend on how many tokens of other documents share its expert.
FEWEST_ROWS = 16


class MoEOutput(NamedTuple):
    y: Tensor  # [T, D] routed sum + shared expert
    counts: Tensor  # [2, E] int64 tokens per expert, of text and of images
    balance: Tensor | None  # fp32 scalar, see `balance_sum`
    chosen: Tensor  # [T, k] int64, as in `Routing`
    routed: Tensor  # [T, D] the routed experts' part of y


class MoE(nn.Module):
    """Routed and shared experts over x [T, D]."""

    def __init__(self, config: ModelConfig, *, ep: Group = Group()) -> None:  # noqa: B008, frozen
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, ep=ep)
        self.shared_experts = SharedExpert(config)

    def forward(
        self,
        x: Tensor,
        live: Tensor,
        image: Tensor,
        documents: Documents | None = None,
        *,
        chosen: Tensor | None = None,
        routed: Tensor | None = None,
    ) -> MoEOutput:
        """live and image [T] bool; with `documents`, also their balance loss.

        A repetition gives the first run's `chosen`, and `routed` if it has that: only the gradient
        of the routed experts is then left to do.
        """
        routing = self.gate(x, live, image, documents, chosen=chosen)
        out = self.experts(x, routing, known=routed)
        # Two roundings by design: the routed sum is cast first, the shared output added after.
        y = out + self.shared_experts(x)
        return MoEOutput(y, routing.counts, routing.balance, routing.experts, out)


class Experts(nn.Module):
    """All routed experts, stacked: w13 [E, 2I, D], gate rows (w1) then up rows (w3), and w2
    [E, D, I]. Gate and up are one product."""

    def __init__(self, config: ModelConfig, *, ep: Group = Group()) -> None:  # noqa: B008, frozen
        super().__init__()
        self.ep = ep
        e, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w13 = nn.Parameter(torch.empty(e, 2 * inner, width))
        self.w2 = nn.Parameter(torch.empty(e, width, inner))
        self.limit, self.workspace_bytes = config.swiglu_limit, config.workspace_mb << 20

    def forward(self, x: Tensor, routing: Routing, *, known: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], 0 for padding tokens; `known` is this result if it is at hand."""
        w13, w2 = self.w13.to(x.dtype), self.w2.to(x.dtype)
        settings = self.limit, self.workspace_bytes
        return _RoutedExperts.apply(x, routing.weights, w13, w2, known, routing, settings)


class SharedExpert(nn.Module):
    """The expert that every token passes, padding too: the same clamp, no routing weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.w13 = nn.Linear(width, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        w13, w2 = self.w13.weight.to(x.dtype), self.w2.weight.to(x.dtype)
        return _SharedExpert.apply(x, w13, w2, self.limit)


class _SharedExpert(torch.autograd.Function):
    """Keeps x alone, like the routed experts."""

    @staticmethod
    def forward(ctx, x, w13, w2, limit):  # type: ignore[override]
        ctx.save_for_backward(x, w13, w2)
        ctx.limit = limit
        return _swiglu(x @ w13.t(), limit).act.to(x.dtype) @ w2.t()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w13, w2 = ctx.saved_tensors
        parts = _swiglu(x @ w13.t(), ctx.limit)
        grad_w2 = grad.t() @ parts.act.to(x.dtype)
        by_both = _swiglu_backward((grad @ w2).float(), parts).to(x.dtype)
        return by_both @ w13, by_both.t() @ x, grad_w2, None


class _RoutedExperts(torch.autograd.Function):
    """Sort the token slots by expert, run a few experts at a time, add their outputs to the tokens.

    The sum over a token's k experts is fp32, in the order of expert numbers. A group is as many
    experts as the workspace has room for, at least one. Its rows and pre-activations live only
    while it runs, and backward makes them again from x, unless one group takes all.
    """

    @staticmethod
    def forward(ctx, x, weights, w13, w2, known, routing, settings):  # type: ignore[override]
        limit, workspace_bytes = settings
        groups = list(_Slots.of(routing).groups(_bytes_per_slot(w13), workspace_bytes))
        ctx.save_for_backward(x, weights, w13, w2)
        ctx.settings = groups, limit
        ctx.kept = None
        if known is not None:
            return known
        out = torch.zeros_like(x, dtype=torch.float32)
        for g in groups:
            rows = x.index_select(0, g.token)
            parts = _swiglu(_by_expert(rows, w13.mT, g), limit)
            hidden = (parts.act * weights.flatten()[g.slot, None]).to(x.dtype)
            out.index_add_(0, g.token, _by_expert(hidden, w2.mT, g).float())
            if len(groups) == 1:
                ctx.kept = rows, parts
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weights, w13, w2 = ctx.saved_tensors
        groups, limit = ctx.settings
        grad_w13, grad_w2 = torch.empty_like(w13), torch.empty_like(w2)
        grad_weights = torch.zeros_like(weights)
        grad_x = torch.zeros_like(x, dtype=torch.float32)
        for g in groups:
            if ctx.kept:
                rows, parts = ctx.kept
            else:
                rows = x.index_select(0, g.token)
                parts = _swiglu(_by_expert(rows, w13.mT, g), limit)
            by_y = grad.index_select(0, g.token)
            weight = weights.flatten()[g.slot, None]
            _add_outer(grad_w2, by_y, (parts.act * weight).to(x.dtype), g)
            by_hidden = _by_expert(by_y, w2, g).float()
            grad_weights.view(-1)[g.slot] = (by_hidden * parts.act).sum(-1)
            by_both = _swiglu_backward(by_hidden.mul_(weight), parts).to(x.dtype)
            _add_outer(grad_w13, by_both, rows, g)
            grad_x.index_add_(0, g.token, _by_expert(by_both, w13, g).float())
        return grad_x.to(x.dtype), grad_weights, grad_w13, grad_w2, None, None, None


class _Group(NamedTuple):
    """Token slots of consecutive experts, sorted by expert."""

    first: int  # expert
    sizes: list[int]  # slots of expert first, first + 1, ...
    slot: Tensor  # [n] int64, flat index token * k + choice
    token: Tensor  # [n] int64


class _Slots(NamedTuple):
    """The T * k token slots in expert order; those of padding tokens come last and are not run."""

    order: Tensor
    sizes: list[int]
    k: int

    @classmethod
    def of(cls, routing: Routing) -> _Slots:
        order = torch.argsort(routing.experts.flatten(), stable=True)
        return cls(order, routing.counts.sum(0).tolist(), routing.experts.shape[1])

    def groups(self, bytes_per_slot: int, workspace_bytes: int) -> Iterator[_Group]:
        room = max(1, workspace_bytes // bytes_per_slot)
        first = at = 0
        while first < len(self.sizes):
            last, total = first + 1, self.sizes[first]
            while last < len(self.sizes) and total + self.sizes[last] <= room:
                total += self.sizes[last]
                last += 1
            slot = self.order[at : at + total]
            yield _Group(first, self.sizes[first:last], slot, slot // self.k)
            first, at = last, at + total


def _bytes_per_slot(w13: Tensor) -> int:
    """Of backward's temporaries: four rows of width D and, in fp32, about five of width 2I."""
    return 4 * (4 * w13.shape[2] + 5 * w13.shape[1])


def _by_expert(rows: Tensor, weight: Tensor, g: _Group) -> Tensor:
    """rows [n, a], each times its expert's weight[e] (weight [E, a, b]) -> [n, b]."""
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    parts = zip(rows.split(g.sizes), out.split(g.sizes), strict=True)
    for e, (part, result) in enumerate(parts, start=g.first):
        missing = FEWEST_ROWS - len(part)
        if len(part) == 0 or missing <= 0:
            torch.mm(part, weight[e], out=result)
        else:
            result.copy_((F.pad(part, (0, 0, 0, missing)) @ weight[e])[: len(part)])
    return out


def _add_outer(total: Tensor, left: Tensor, right: Tensor, g: _Group) -> None:
    """Write left^T @ right of each expert's slots to total[e]; an expert without any gets zeros."""
    parts = zip(left.split(g.sizes), right.split(g.sizes), strict=True)
    for e, (one, other) in enumerate(parts, start=g.first):
        torch.mm(one.t(), other, out=total[e])


class _Parts(NamedTuple):
    """fp32 pieces of silu(min(gate, limit)) * clamp(up, +-limit), [n, I] each, after the clamps."""

    gate: Tensor
    up: Tensor
    silu: Tensor
    act: Tensor
    clamped: Tensor | None  # [n, 2I] bool, where a clamp has cut gate or up; None: nowhere


def _swiglu(both: Tensor, limit: float) -> _Parts:
    """both [n, 2I]: gate then up, before the clamps."""
    both, clamped = both.float(), None
    gate, up = both.chunk(2, dim=-1)
    if _may_reach(both, limit):
        clamped = torch.cat([gate > limit, up.abs() > limit], dim=-1)
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    silu = F.silu(gate)
    return _Parts(gate, up, silu, up * silu, clamped)


def _may_reach(both: Tensor, limit: float) -> bool:
    """False when no clamp has anything to do, the usual case: one pass instead of nine.

    Only where reading a number does not make the host wait for a device.
    """
    if both.device.type != "cpu" or both.numel() == 0:
        return True
    low, high = torch.aminmax(both)
    return not (-limit <= float(low) and float(high) <= limit)


def _swiglu_backward(by_act: Tensor, parts: _Parts) -> Tensor:
    """Gradient [n, 2I] fp32 of gate and up. A clamped value passes none; at the limit it does."""
    out = by_act.new_empty(by_act.shape[0], 2 * by_act.shape[1])
    by_gate, by_up = out.chunk(2, dim=-1)
    torch.mul(by_act, parts.up, out=by_gate)
    torch.ops.aten.silu_backward.grad_input(by_gate, parts.gate, grad_input=by_gate)
    torch.mul(by_act, parts.silu, out=by_up)
    return out if parts.clamped is None else out.masked_fill_(parts.clamped, 0.0)
