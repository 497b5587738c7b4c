"""The Engram layer: hashed n-gram rows, gated into every residual stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.engram.rows import EngramRows, project_rows

SMALLEST_DOT = 1e-6


class Engram(nn.Module):
    """X_m += gate_m * value, with key [M, D] and value [D] projected from the token's rows.

    dot_m = sum_D(X_m * q_m * k_m * key_m) / (rms(X_m) * rms(key_m)) * D^-1/2, with
    rms(v) = sqrt(mean v^2 + eps);
    gate_m = sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))), all fp32, and 0 on dead tokens.
    """

    gate: Callable[[Tensor, Tensor, Tensor, float], Tensor]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        m, width = config.hc_mult, config.hidden_size
        self.streams, self.eps = m, config.rms_norm_eps
        self.wkv = nn.Linear(
            config.engram_columns * config.engram_head_dim, (m + 1) * width, bias=False
        )
        self.q_weight = nn.Parameter(torch.empty(m, width))
        self.k_weight = nn.Parameter(torch.empty(m, width))
        self.gate = engram_gate

    def forward(self, streams: Tensor, rows: EngramRows, alive: Tensor) -> tuple[Tensor, Tensor]:
        """streams [T, M, D]; rows of the same T tokens; alive [T] bool, false on padding and image
        tokens. Returns the new streams and the mean gate over live tokens (fp32 scalar)."""
        projected = project_rows(rows, self.wkv.weight, streams.dtype)
        key, value = projected.split([self.streams * streams.shape[-1], streams.shape[-1]], dim=-1)
        key = key.unflatten(-1, (self.streams, -1))
        # The weights are rounded like any other and multiplied in fp32.
        kind = streams.dtype
        weight = self.q_weight.to(kind).float() * self.k_weight.to(kind).float()
        gate = self.gate(streams, key, weight, self.eps) * alive[:, None]
        mean = gate.detach().sum() / (alive.sum().clamp_min(1) * self.streams)
        added = streams.float() + gate[:, :, None] * value.float()[:, None]
        return added.to(streams.dtype), mean


def engram_gate(x: Tensor, key: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The gates [T, M] of streams x and keys [T, M, D]; weight [M, D] is q_weight * k_weight."""
    dot = _NormalisedDot.apply(x, key, weight, eps)
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(SMALLEST_DOT).sqrt(), dot))


class _NormalisedDot(torch.autograd.Function):
    """sum_D(x * weight * key) / (rms(x) rms(key)) * D^-1/2: [T, M, D], [M, D] -> [T, M], fp32.

    Keeps its two inputs as they are and three numbers a stream; autograd would keep four more
    [T, M, D].
    """

    @staticmethod
    def forward(ctx, x: Tensor, key: Tensor, weight: Tensor, eps: float):  # type: ignore[override]
        wide, wide_key = x.float(), key.float()
        x_scale = torch.rsqrt(wide.square().mean(-1) + eps)
        key_scale = torch.rsqrt(wide_key.square().mean(-1) + eps)
        scale = x_scale * key_scale * x.shape[-1] ** -0.5
        dot = (wide * weight * wide_key).sum(-1) * scale
        ctx.save_for_backward(x, key, weight, x_scale, key_scale, dot)
        return dot

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, key, weight, x_scale, key_scale, dot = ctx.saved_tensors
        kind, width = x.dtype, x.shape[-1]
        x, key = x.float(), key.float()
        by_sum = (grad * x_scale * key_scale * width**-0.5)[..., None]
        by_norm = grad * dot / width
        grad_x = by_sum * weight * key - (by_norm * x_scale.square())[..., None] * x
        grad_key = by_sum * weight * x - (by_norm * key_scale.square())[..., None] * key
        return grad_x.to(kind), grad_key.to(kind), (by_sum * x * key).sum(0), None
