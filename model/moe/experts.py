"""Routed and shared SwiGLU experts with a clamp."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.moe.router import Router, Routing


class MoE(nn.Module):
    """x [T, D] -> (routed sum + shared expert [T, D], tokens per expert [E])."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor, live: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.gate(x, live, image)
        # Two roundings by design: the routed sum is cast first, the shared output added after.
        return self.experts(x, routing) + self.shared_experts(x), routing.counts


class Experts(nn.Module):
    """All routed experts in three stacked tensors, w1 and w3 [E, I, D], w2 [E, D, I]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        e, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w1 = nn.Parameter(torch.empty(e, inner, width))
        self.w2 = nn.Parameter(torch.empty(e, width, inner))
        self.w3 = nn.Parameter(torch.empty(e, inner, width))
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return _RoutedExperts.apply(
            x,
            routing.weights,
            self.w1.to(x.dtype),
            self.w2.to(x.dtype),
            self.w3.to(x.dtype),
            routing.experts,
            routing.counts,
            self.limit,
        )


class SharedExpert(nn.Module):
    """The expert that every token passes, padding too: the same clamp, no routing weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(_ClampedSwiGLU.apply(self.w1(x), self.w3(x), self.limit))


class _ClampedSwiGLU(torch.autograd.Function):
    """Keeps the two pre-activations alone."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, limit: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return _swiglu(gate, up, limit)[0].to(gate.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        gate, up = ctx.saved_tensors
        _, by_gate, by_up = _swiglu(gate, up, ctx.limit, slopes=True)
        grad = grad.float()
        return by_gate.mul_(grad).to(gate.dtype), by_up.mul_(grad).to(up.dtype), None


class _RoutedExperts(torch.autograd.Function):
    """Sort the token slots by expert, run each expert on its stretch, weigh, put back, sum.

    Keeps x and the two pre-activations; everything else is rebuilt in backward.
    """

    @staticmethod
    def forward(ctx, x, weights, w1, w2, w3, experts, counts, limit):  # type: ignore[override]
        k = experts.shape[1]
        order = torch.argsort(experts.flatten(), stable=True)
        sizes = counts.tolist()
        token = order[: sum(sizes)] // k
        slot_weight = weights.flatten()[order[: sum(sizes)]]
        rows = x.index_select(0, token)
        gate, up = _by_expert(rows, w1, sizes), _by_expert(rows, w3, sizes)
        hidden = _swiglu(gate, up, limit)[0].mul_(slot_weight[:, None]).to(x.dtype)
        y = _by_expert(hidden, w2, sizes)
        ctx.save_for_backward(x, w1, w2, w3, gate, up, slot_weight, order)
        ctx.settings = sizes, limit, k
        return _sum_slots(y, order, k).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w1, w2, w3, gate, up, slot_weight, order = ctx.saved_tensors
        sizes, limit, k = ctx.settings
        token = order[: sum(sizes)] // k
        rows, by_y = x.index_select(0, token), grad.index_select(0, token)
        act, by_gate, by_up = _swiglu(gate, up, limit, slopes=True)
        hidden = (act * slot_weight[:, None]).to(x.dtype)
        grad_w2 = _outer_by_expert(by_y, hidden, sizes, w2)
        by_hidden = _by_expert(by_y, w2.mT, sizes).float()
        grad_slot = (by_hidden * act).sum(-1)
        by_act = by_hidden.mul_(slot_weight[:, None])
        d_gate = by_gate.mul_(by_act).to(x.dtype)
        d_up = by_up.mul_(by_act).to(x.dtype)
        grad_w1 = _outer_by_expert(d_gate, rows, sizes, w1)
        grad_w3 = _outer_by_expert(d_up, rows, sizes, w3)
        grad_rows = _by_expert(d_gate, w1.mT, sizes)
        grad_rows = _by_expert(d_up, w3.mT, sizes, plus=grad_rows)
        grad_weights = grad_slot.new_zeros(order.numel())
        grad_weights[order[: sum(sizes)]] = grad_slot
        grad_x = _sum_slots(grad_rows, order, k).to(x.dtype)
        return grad_x, grad_weights.view(-1, k), grad_w1, grad_w2, grad_w3, None, None, None


def _by_expert(rows: Tensor, weight: Tensor, sizes: list[int], plus: Tensor | None = None) -> Tensor:
    """rows [N, a] sorted by expert times weight[e]^T (weight [E, b, a]) -> [N, b]; adds to `plus`."""
    out = rows.new_empty(rows.shape[0], weight.shape[1]) if plus is None else plus
    at = 0
    for e, size in enumerate(sizes):
        if size:
            part = out[at : at + size]
            if plus is None:
                torch.mm(rows[at : at + size], weight[e].t(), out=part)
            else:
                part.addmm_(rows[at : at + size], weight[e].t())
            at += size
    return out


def _outer_by_expert(left: Tensor, right: Tensor, sizes: list[int], like: Tensor) -> Tensor:
    """Per expert left^T @ right: the gradient of a stacked weight; zero where no token came."""
    out = torch.empty_like(like)
    at = 0
    for e, size in enumerate(sizes):
        torch.mm(left[at : at + size].t(), right[at : at + size], out=out[e])
        at += size
    return out


def _swiglu(
    gate: Tensor, up: Tensor, limit: float, *, slopes: bool = False
) -> tuple[Tensor, ...]:
    """silu(min(gate, limit)) * clamp(up, +-limit) in fp32, and its slopes by gate and by up.

    A clamped value passes no gradient; at the limit itself it does, as torch's clamp has it.
    """
    g, u = gate.float(), up.float()
    low, mid = g.clamp_max(limit), u.clamp(-limit, limit)
    half = torch.sigmoid(low)
    silu = low * half
    if not slopes:
        return (silu * mid,)
    by_gate = (half + silu * (1 - half)) * mid * (g <= limit)
    return silu * mid, by_gate, silu * (u.abs() <= limit)


def _sum_slots(slots: Tensor, order: Tensor, k: int) -> Tensor:
    """Routed slots [N, D] back to tokens: fp32 sum over each token's k slots -> [T, D].

    Slots of padding tokens sort last and were not computed; they count as zero.
    """
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    if slots.shape[0] < order.numel():
        slots = torch.cat([slots, slots.new_zeros(1, slots.shape[1])])
        back.clamp_max_(slots.shape[0] - 1)
    return slots.index_select(0, back).view(-1, k, slots.shape[1]).sum(1, dtype=torch.float32)
