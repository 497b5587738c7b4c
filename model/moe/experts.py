"""Routed and shared SwiGLU experts with a clamp."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.layout import Documents
from model.moe.exchange import ExchangedExperts
from model.moe.routed import RoutedExperts
from model.moe.router import Router, Routing
from model.moe.swiglu import swiglu, swiglu_backward
from model.parallel.group import Group


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
    [E, D, I]. Gate and up are one product.

    With a group `ep` of n ranks, the weights of rank r are cut, after they are made, to experts
    r E/n to (r + 1) E/n: a plain tensor, or a DTensor whose local part it is.
    """

    def __init__(self, config: ModelConfig, *, ep: Group = Group()) -> None:  # noqa: B008, frozen
        super().__init__()
        self.ep = ep
        e, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w13 = nn.Parameter(torch.empty(e, 2 * inner, width))
        self.w2 = nn.Parameter(torch.empty(e, width, inner))
        self.limit, self.workspace_bytes = config.swiglu_limit, config.workspace_mb << 20

    def forward(self, x: Tensor, routing: Routing, *, known: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], 0 for padding tokens; `known` is this result if it is at hand."""
        w13, w2 = _local(self.w13).to(x.dtype), _local(self.w2).to(x.dtype)
        settings = self.limit, self.workspace_bytes
        if self.ep.size > 1:
            assert len(w13) * self.ep.size == routing.counts.shape[-1], "experts are not cut"
            tensors = x, routing.weights, w13, w2, known
            return ExchangedExperts.apply(*tensors, routing, settings, self.ep)
        return RoutedExperts.apply(x, routing.weights, w13, w2, known, routing, settings)


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
        return swiglu(x @ w13.t(), limit) @ w2.t()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w13, w2 = ctx.saved_tensors
        found = swiglu_backward(grad @ w2, x @ w13.t(), ctx.limit)
        return found.by_both @ w13, found.by_both.t() @ x, grad.t() @ found.hidden, None


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a DTensor, with the gradient's way back; any other tensor as it is."""
    to_local = getattr(weight, "to_local", None)
    return weight if to_local is None else to_local()
