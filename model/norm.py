"""RMSNorm with an fp32 island: normalise and weigh in fp32, cast once at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.kernels.library import kernels


class RMSNorm(nn.Module):
    """x * rsqrt(mean x^2 + eps) * weight over the last dim, in fp32; returned in x's dtype.

    The weight is rounded to x's dtype first, but for norms that keep it in fp32.
    """

    function: Callable[[Tensor, Tensor, float], Tensor]

    def __init__(self, dim: int, eps: float, *, fp32_weight: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.fp32_weight = eps, fp32_weight
        self.function = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.fp32_weight else self.weight.to(x.dtype)
        return self.function(x, weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of RMSNorm with this weight, as it is."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one scale a row for backward, instead of autograd's three copies of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        if k := kernels(x, weight, width=x.shape[-1]):
            given, scale = x.contiguous(), x.new_empty(*x.shape[:-1], 1)
            out = torch.empty_like(given)
            k.run("norm_forward", scale.numel(), x.shape[-1], eps, given, weight, out, scale)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return ((wide * scale) * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        if k := kernels(x, weight, grad, width=x.shape[-1]):
            rows, width = scale.numel(), x.shape[-1]
            given = grad.contiguous(), x.contiguous(), weight, scale
            made = torch.empty_like(given[1]), torch.empty_like(weight)
            k.run("norm_backward", rows, width, *given, *made)
            return *made, None
        grad, unit = grad.float(), x.float() * scale
        by_unit = grad * weight.float()
        projection = (by_unit * unit).mean(-1, keepdim=True)
        grad_x = (by_unit - unit * projection) * scale
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
