"""Single-pass manifold-constrained hyper-connections (mHC): M residual streams per token.

Each sublayer reads `sum_m pre_m X_m` with the pre-mix made at the PREVIOUS site, and writes its
output y back as `X_k <- post_k * y + sum_j comb[j, k] * X_j` with its own post and comb. Everything
here is fp32; only the streams may be stored in a narrower type.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig


class Mix(NamedTuple):
    """fp32 coefficients of one site for T tokens."""

    pre: Tensor  # [T, M], for the NEXT site to read with
    post: Tensor  # [T, M]
    comb: Tensor  # [T, M_in, M_out], nearly doubly stochastic


class HyperConnection(nn.Module):
    """The coefficients of one site from its streams [T, M, D].

    z = (fn @ x) * rsqrt(mean x^2 + eps) over the flattened streams (project first, then scale);
    logits = base + z * scale with one scale each for pre, post and comb.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        m = config.hc_mult
        self.streams = m
        self.fn = nn.Parameter(torch.empty(m * (m + 2), m * config.hidden_size))
        self.base = nn.Parameter(torch.empty(m * (m + 2)))
        self.scale = nn.Parameter(torch.empty(3))
        self.norm_eps, self.eps = config.rms_norm_eps, config.hc_eps
        self.iterations = config.hc_sinkhorn_iters

    def forward(self, streams: Tensor) -> Mix:
        m = self.streams
        z = _ProjectScaled.apply(streams.flatten(1), self.fn, self.norm_eps)
        scale = torch.cat([self.scale[i : i + 1].expand(n) for i, n in enumerate((m, m, m * m))])
        logits = torch.addcmul(self.base, z, scale)
        pre, post, comb = logits.split([m, m, m * m], dim=-1)
        return Mix(
            pre=torch.sigmoid(pre) + self.eps,
            post=2 * torch.sigmoid(post),
            comb=_Sinkhorn.apply(comb, m, self.iterations, self.eps),
        )


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """What a sublayer sees: sum_m pre_m X_m in fp32, [T, D], returned in the streams' type."""
    return _Read.apply(streams, pre)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a sublayer's output y [T, D]: [T, M, D] in the streams' type."""
    return _Expand.apply(y, streams, post, comb)


class _ProjectScaled(torch.autograd.Function):
    """(fn @ x) * rsqrt(mean x^2 + eps) in fp32 from x [T, N] of any type -> [T, out] fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, fn: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        wide = x.float()
        raw = wide @ fn.t()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.rsqrt(length.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, fn, raw, scale)
        return raw * scale

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, fn, raw, scale = ctx.saved_tensors
        wide, by_raw = x.float(), grad * scale
        by_scale = (grad * raw).sum(-1, keepdim=True)
        grad_x = (wide * (by_scale * scale.pow(3) / -x.shape[-1])).addmm_(by_raw, fn)
        return grad_x.to(x.dtype), by_raw.t() @ wide, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams: Tensor, pre: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(streams, pre)
        return torch.bmm(pre[:, None], streams.float())[:, 0].to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        streams, pre = ctx.saved_tensors
        grad = grad.float()
        grad_streams = pre[:, :, None] * grad[:, None]
        grad_pre = torch.bmm(grad[:, None], streams.float().mT)[:, 0]
        return grad_streams.to(streams.dtype), grad_pre


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y, streams, post, comb)
        own = post[:, :, None] * y.float()[:, None]
        return own.baddbmm_(comb.mT, streams.float()).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        y, streams, post, comb = ctx.saved_tensors
        grad = grad.float()
        grad_y = torch.bmm(post[:, None], grad)[:, 0]
        grad_post = torch.bmm(y.float()[:, None], grad.mT)[:, 0]
        grad_streams = torch.bmm(comb, grad)
        grad_comb = torch.bmm(streams.float(), grad.mT)
        return grad_y.to(y.dtype), grad_streams.to(streams.dtype), grad_post, grad_comb


class _Sinkhorn(torch.autograd.Function):
    """Logits [T, M*M] -> comb [T, M_in, M_out]: row softmax + eps, columns, then rows and columns.

    Works on [M, M, T] so that every division runs along tokens. Keeps the divisors: making them
    again is half of backward's time. With h = gradient * value, a division by a sum undoes as
    h <- h - value * sum(h).
    """

    @staticmethod
    def forward(ctx, logits: Tensor, m: int, iterations: int, eps: float) -> Tensor:  # type: ignore[override]
        comb, divisors = _balanced(logits, m, iterations, eps)
        ctx.save_for_backward(comb, divisors)
        ctx.eps = eps
        return comb.permute(2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        comb, divisors = ctx.saved_tensors
        comb = comb.clone()
        by_log = comb * grad.permute(1, 2, 0)
        total = torch.empty_like(divisors[0])
        for step in reversed(range(len(divisors))):
            axis = step % 2
            torch.sum(by_log, axis, out=total)
            by_log.addcmul_(comb, total.unsqueeze(axis), value=-1)
            comb.mul_(divisors[step].unsqueeze(axis))
        grad = by_log.div_(comb)
        soft = comb.sub_(ctx.eps)
        grad = soft * (grad - (grad * soft).sum(1, keepdim=True))
        return grad.flatten(0, 1).t(), None, None, None


def _balanced(logits: Tensor, m: int, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """The final comb [M_in, M_out, T] and the divisors on the way [2 * iterations - 1, M, T]."""
    # eps along the rim: a sum over comb and the rim beside it is the divisor, eps included.
    room = logits.new_full((m + 1, m + 1, len(logits)), eps)
    comb, with_rim = room[:m, :m], (room[:, :m], room[:m])
    comb.add_(torch.softmax(logits.t().reshape(m, m, -1), 1))
    divisors = logits.new_empty(2 * iterations - 1, m, len(logits))
    for step, divisor in enumerate(divisors):
        axis = step % 2  # columns (sums over the input streams) first and last
        torch.sum(with_rim[axis], axis, out=divisor)
        comb.div_(divisor.unsqueeze(axis))
    return comb, divisors
