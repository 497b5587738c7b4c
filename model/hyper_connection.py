"""Single-pass manifold-constrained hyper-connections (mHC): M residual streams per token.

Each sublayer reads `sum_m pre_m X_m` with the pre-mix made at the PREVIOUS site, and writes its
output y back as `X_k <- post_k * y + sum_j comb[j, k] * X_j` with its own post and comb. Everything
here is fp32; only the streams may be stored in a narrower type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.kernels.library import Kernels, kernels

KERNEL_STREAMS = 4  # all that the kernels know
Reading = Callable[[Tensor, Tensor], Tensor]  # `read`, maybe compiled


class Mix(NamedTuple):
    """fp32 coefficients of one site for T tokens."""

    pre: Tensor  # [T, M], for the NEXT site to read with
    post: Tensor  # [T, M]
    comb: Tensor  # [T, M_in, M_out], nearly doubly stochastic


class Entered(NamedTuple):
    """What a sublayer takes from its streams."""

    x: Tensor  # [T, D], see `read`
    mix: Mix
    streams: Tensor  # the same, to expand: so their whole gradient is made in one pass


class HyperConnection(nn.Module):
    """The coefficients of one site from its streams [T, M, D].

    z = (fn @ x) * rsqrt(mean x^2 + eps) over the flattened streams (project first, then scale);
    logits = base + z * scale with one scale each for pre, post and comb.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        m = config.hc_mult
        self.fn = nn.Parameter(torch.empty(m * (m + 2), m * config.hidden_size))
        self.base = nn.Parameter(torch.empty(m * (m + 2)))
        self.scale = nn.Parameter(torch.empty(3))
        self.norm_eps, self.eps = config.rms_norm_eps, config.hc_eps
        self.iterations = config.hc_sinkhorn_iters

    def forward(self, streams: Tensor, pre: Tensor, reading: Reading) -> Entered:
        """pre [T, M]: what the site before has made to read with."""
        x, z, streams = enter(streams, pre, self.fn, self.norm_eps, reading)
        mix = coefficients(z, self.base, self.scale, self.iterations, self.eps)
        return Entered(x, mix, streams)


def enter(
    streams: Tensor, pre: Tensor, fn: Tensor, eps: float, reading: Reading
) -> tuple[Tensor, Tensor, Tensor]:
    """What a sublayer sees, the projections z [T, M(M+2)] fp32, and the streams to expand."""
    if reading is read and _kernels(streams, pre, fn):
        return _Enter.apply(streams, pre, fn, eps)  # type: ignore[return-value]
    z = _ProjectScaled.apply(streams.flatten(1), fn, eps)
    return reading(streams, pre), z, streams  # type: ignore[return-value]


def coefficients(z: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float) -> Mix:
    """sigmoid + eps, twice the sigmoid, and Sinkhorn of the logits from z [T, M(M+2)]."""
    m = math.isqrt(z.shape[1] + 1) - 1
    if m == KERNEL_STREAMS and kernels(z, base, scale):
        return Mix(*_Mixes.apply(z, base, scale, iterations, eps))
    scales = torch.cat([scale[i : i + 1].expand(n) for i, n in enumerate((m, m, m * m))])
    pre, post, comb = torch.addcmul(base, z, scales).split([m, m, m * m], dim=-1)
    return Mix(
        pre=torch.sigmoid(pre) + eps,
        post=2 * torch.sigmoid(post),
        comb=_Sinkhorn.apply(comb, m, iterations, eps),
    )


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """What a sublayer sees: sum_m pre_m X_m in fp32, [T, D], returned in the streams' type."""
    return _Read.apply(streams, pre)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a sublayer's output y [T, D]: [T, M, D] in the streams' type."""
    return _Expand.apply(y, streams, post, comb)


def _kernels(streams: Tensor, *others: Tensor) -> Kernels | None:
    """The kernels, where they know such streams [T, M, D]."""
    fits = streams.shape[1] == KERNEL_STREAMS
    return kernels(streams, *others, width=streams.shape[2]) if fits else None


class _Enter(torch.autograd.Function):
    """`read` and `_ProjectScaled` at once, by kernels, and the streams handed on."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, streams: Tensor, pre: Tensor, fn: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, _, width = streams.shape
        k = kernels(streams, pre, fn)
        assert k is not None
        given = streams.contiguous(), pre.contiguous(), fn
        x, z = streams.new_empty(tokens, width), fn.new_empty(tokens, len(fn))
        scale = fn.new_empty(tokens)
        k.run("enter_forward", tokens, width, eps, *given, x, z, scale)
        ctx.save_for_backward(streams, pre, fn, z, scale)
        return x, z, streams

    @staticmethod
    def backward(ctx, grad_x: Tensor, grad_z: Tensor, grad_streams: Tensor):  # type: ignore[override]
        streams, pre, fn, z, scale = ctx.saved_tensors
        tokens, _, width = streams.shape
        k = kernels(streams, pre, fn, grad_x, grad_z, grad_streams)
        assert k is not None
        grads = [grad.contiguous() for grad in (grad_streams, grad_x, grad_z)]
        given = streams.contiguous(), pre.contiguous(), fn
        made = [torch.empty_like(part) for part in given]
        k.run("enter_backward", tokens, width, *grads, *given, z, scale, *made)
        return *made, None


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


class _Mixes(torch.autograd.Function):
    """The coefficients from z [T, M(M+2)], of four streams, by kernels; keeps nothing but z."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, z: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, m, k = len(z), KERNEL_STREAMS, kernels(z, base, scale)
        assert k is not None
        mix = z.new_empty(tokens, m), z.new_empty(tokens, m), z.new_empty(tokens, m, m)
        k.run("mixes_forward", tokens, iterations, eps, z, base, scale, *mix)
        ctx.save_for_backward(z, base, scale)
        ctx.iterations, ctx.eps = iterations, eps
        return mix

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[override]
        z, base, scale = ctx.saved_tensors
        k = kernels(z, base, scale, *grads)
        assert k is not None
        out = torch.empty_like(z), torch.empty_like(base), torch.empty_like(scale)
        args = z, base, scale, *(grad.contiguous() for grad in grads), *out
        k.run("mixes_backward", len(z), ctx.iterations, ctx.eps, *args)
        return *out, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, streams: Tensor, pre: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(streams, pre)
        if k := _kernels(streams, pre):
            tokens, _, width = streams.shape
            out = streams.new_empty(tokens, width)
            k.run("read_forward", tokens, width, streams.contiguous(), pre.contiguous(), out)
            return out
        return torch.bmm(pre[:, None], streams.float())[:, 0].to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        streams, pre = ctx.saved_tensors
        if k := _kernels(streams, pre, grad):
            tokens, _, width = streams.shape
            given = [part.contiguous() for part in (grad, streams, pre)]
            made = [torch.empty_like(part) for part in given[1:]]
            k.run("read_backward", tokens, width, *given, *made)
            return tuple(made)
        grad = grad.float()
        grad_streams = pre[:, :, None] * grad[:, None]
        grad_pre = torch.bmm(grad[:, None], streams.float().mT)[:, 0]
        return grad_streams.to(streams.dtype), grad_pre


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(y, streams, post, comb)
        if k := _kernels(streams, y, post, comb):
            tokens, _, width = streams.shape
            given = [part.contiguous() for part in (y, streams, post, comb)]
            out = torch.empty_like(given[1])
            k.run("expand_forward", tokens, width, *given, out)
            return out
        own = post[:, :, None] * y.float()[:, None]
        return own.baddbmm_(comb.mT, streams.float()).to(streams.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        y, streams, post, comb = ctx.saved_tensors
        if k := _kernels(streams, y, post, comb, grad):
            tokens, _, width = streams.shape
            given = [part.contiguous() for part in (grad, y, streams, post, comb)]
            made = [torch.empty_like(part) for part in given[1:]]
            k.run("expand_backward", tokens, width, *given, *made)
            return tuple(made)
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
