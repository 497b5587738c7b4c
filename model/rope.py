"""Rotary positions: plain for window-only layers, YaRN for compressed ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kernels.library import Kernels, kernels


def plain_frequencies(config: ModelConfig) -> Tensor:
    """[rope_dim / 2] fp32: rope_theta^(-2i / rope_dim)."""
    return _frequencies(config.rope_theta, config.qk_rope_head_dim)


def yarn_frequencies(config: ModelConfig) -> Tensor:
    """[rope_dim / 2] fp32 for every layer with a ratio > 0, ratio 1 included.

    Channels that turn fewer than beta_slow times within the original length are divided by the
    factor, those that turn more than beta_fast times are left alone, with a linear ramp between.
    There is no magnitude scale.
    """
    y, dim, theta = config.rope_scaling, config.qk_rope_head_dim, config.compress_rope_theta

    def channel(turns: float) -> float:
        original = y.original_max_position_embeddings
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(channel(y.beta_fast)), 0)
    high = min(math.ceil(channel(y.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    f = _frequencies(theta, dim)
    return f / y.factor * ramp + f * (1 - ramp)


def rotation(frequencies: Tensor, position: Tensor) -> Tensor:
    """Unit complex numbers [T, rope_dim / 2] (complex64) for integer positions [T]."""
    angles = position.float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate the LAST channels of x [T, ..., C], adjacent pairs taken as complex numbers.

    `turn` is [T, n] for 2n channels; pass its conjugate to rotate back. Computed in fp32, returned
    in x's dtype.
    """
    return _Rotate.apply(x, turn)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, turn: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(turn)
        return turned(x, turn)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        (turn,) = ctx.saved_tensors
        return turned(grad, turn.conj()), None


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """`rotate` without a gradient, for use inside a backward of one's own."""
    x = x.contiguous()
    if run := kernels(x, width=2 * turn.shape[-1]):
        return _by_kernel(run, x, turn, torch.empty_like(x))
    return _turn_(x.clone(), turn)


def turn_(x: Tensor, turn: Tensor) -> Tensor:
    """`turned` in place: for a contiguous x that nobody else reads."""
    if run := kernels(x, width=2 * turn.shape[-1]):
        return _by_kernel(run, x, turn, x)
    return _turn_(x, turn)


def _turn_(x: Tensor, turn: Tensor) -> Tensor:
    tail = x[..., -2 * turn.shape[-1] :]
    wide = tail.float()
    turn = turn.view(turn.shape[0], *[1] * (x.dim() - 2), turn.shape[1])
    torch.view_as_complex(wide.unflatten(-1, (-1, 2))).mul_(turn)
    if wide is not tail:
        tail.copy_(wide)
    return x


def _by_kernel(run: Kernels, x: Tensor, turn: Tensor, out: Tensor) -> Tensor:
    sizes = x.shape[0], x[0].numel() // x.shape[-1] if len(x) else 0, x.shape[-1], turn.shape[-1]
    pairs = torch.view_as_real(turn.conj() if turn.is_conj() else turn).contiguous()
    run.run("rotate", *sizes, int(turn.is_conj()), x, pairs, out)
    return out


def _frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
