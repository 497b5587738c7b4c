"""Routed and shared SwiGLU experts with a clamp."""

from __future__ import annotations

from collections.abc import Iterator

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
        weights = self.w1.weight, self.w2.weight, self.w3.weight
        return _SharedExpert.apply(x, *(w.to(x.dtype) for w in weights), self.limit)


class _SharedExpert(torch.autograd.Function):
    """Keeps x alone, like the routed experts."""

    @staticmethod
    def forward(ctx, x, w1, w2, w3, limit):  # type: ignore[override]
        ctx.save_for_backward(x, w1, w2, w3)
        ctx.limit = limit
        return _swiglu(x @ w1.t(), x @ w3.t(), limit)[0].to(x.dtype) @ w2.t()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w1, w2, w3 = ctx.saved_tensors
        act, by_gate, by_up = _swiglu(x @ w1.t(), x @ w3.t(), ctx.limit, slopes=True)
        grad_w2 = grad.t() @ act.to(x.dtype)
        by_act = (grad @ w2).float()
        by_gate, by_up = by_gate.mul_(by_act).to(x.dtype), by_up.mul_(by_act).to(x.dtype)
        grad_x = torch.addmm(by_gate @ w1, by_up, w3)
        return grad_x, by_gate.t() @ x, grad_w2, by_up.t() @ x, None


class _RoutedExperts(torch.autograd.Function):
    """Sort the token slots by expert, run expert after expert, add each one's output to its tokens.

    The sum over a token's k experts is fp32, in the order of expert numbers. An expert's rows and pre-activations live only while it runs: forward keeps x, backward makes
    them again. So memory holds one expert's share of them, which also stays in the cache.
    """

    @staticmethod
    def forward(ctx, x, weights, w1, w2, w3, experts, counts, limit):  # type: ignore[override]
        order = torch.argsort(experts.flatten(), stable=True)
        stretches = _Stretches(order, counts.tolist(), experts.shape[1])
        ctx.save_for_backward(x, weights, w1, w2, w3)
        ctx.settings = stretches, limit
        out = torch.zeros_like(x, dtype=torch.float32)
        for e, here, token in stretches:
            rows = x.index_select(0, token)
            act = _swiglu(rows @ w1[e].t(), rows @ w3[e].t(), limit)[0]
            hidden = act.mul_(stretches.of_slots(weights, here)).to(x.dtype)
            out.index_add_(0, token, (hidden @ w2[e].t()).float())
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, weights, w1, w2, w3 = ctx.saved_tensors
        stretches, limit = ctx.settings
        grad_w1, grad_w2, grad_w3 = (torch.zeros_like(w) for w in (w1, w2, w3))
        grad_weights = torch.zeros_like(weights)
        grad_x = torch.zeros_like(x, dtype=torch.float32)
        for e, here, token in stretches:
            rows, by_y = x.index_select(0, token), grad.index_select(0, token)
            gate, up = rows @ w1[e].t(), rows @ w3[e].t()
            act, by_gate, by_up = _swiglu(gate, up, limit, slopes=True)
            slot = stretches.of_slots(weights, here)
            torch.mm(by_y.t(), (act * slot).to(x.dtype), out=grad_w2[e])
            by_hidden = (by_y @ w2[e]).float()
            grad_weights.view(-1)[stretches.order[here]] = (by_hidden * act).sum(-1)
            by_act = by_hidden.mul_(slot)
            by_gate, by_up = by_gate.mul_(by_act).to(x.dtype), by_up.mul_(by_act).to(x.dtype)
            torch.mm(by_gate.t(), rows, out=grad_w1[e])
            torch.mm(by_up.t(), rows, out=grad_w3[e])
            grad_x.index_add_(0, token, torch.addmm(by_gate @ w1[e], by_up, w3[e]).float())
        return grad_x.to(x.dtype), grad_weights, grad_w1, grad_w2, grad_w3, None, None, None


class _Stretches:
    """T * k token slots in expert order: for each expert with work, its slots and their tokens.

    Slots of padding tokens sort last, past every stretch: nothing computes them.
    """

    def __init__(self, order: Tensor, sizes: list[int], k: int) -> None:
        self.order, self.sizes, self.k = order, sizes, k

    def __iter__(self) -> Iterator[tuple[int, slice, Tensor]]:
        at = 0
        for e, size in enumerate(self.sizes):
            here = slice(at, at + size)
            if size:
                yield e, here, self.order[here] // self.k
            at += size

    def of_slots(self, weights: Tensor, here: slice) -> Tensor:
        """Routing weights [T, k] of some slots, as a column."""
        return weights.flatten()[self.order[here], None]


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
