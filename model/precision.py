"""What a bfloat16 model keeps in fp32, and how everything else is used.

Parameters are fp32 whatever the model's type: they are what the optimiser corrects, and most of its
steps are too small for the 8 bits of a bfloat16. Each use of a parameter rounds it to the type of
the activations, but for the ones named below. FSDP with `param_dtype=bfloat16` does the same
rounding when it gathers, and the cast here then changes nothing; so one rank and many compute the
same. Gradients and the optimiser's state are fp32, and so are Engram tables in memory, whose rows
are rounded when they have been read.

Also fp32 inside: the router, softmax, sinks and sums of attention, the inside of norms, mHC, the
Engram gate, SwiGLU, the cross-entropy.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FP32 = re.compile(
    r"(^|\.)(hc_attn|hc_ffn)\.|\.attn_sink$|\.compressor\.(wkv|wgate)\.weight$"
    r"|\.gate\.(bias|bias_vl)$|^head\.weight$|^vision\.(.*\.)?norm\d*\.weight$"
)


def is_fp32(name: str) -> bool:
    """Whether the tensor of this name in a model's state is used in fp32, unrounded.

    A compressor of ratio 1 is the exception in use: its projection is rounded like any other.
    """
    return _FP32.search(name) is not None


class Linear(nn.Linear):
    """x W^T, plus a bias where asked for, both rounded to x's type."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32, [T, in] and [out, in] -> [T, out] fp32; x is kept in its own type."""
    return _WideLinear.apply(x, weight)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, weight = ctx.saved_tensors
        by_x, by_weight = grad @ weight.float(), grad.t() @ x.float()
        return by_x.to(x.dtype), by_weight.to(weight.dtype)
