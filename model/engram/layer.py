"""The Engram layer: hashed n-gram rows, gated into every residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import ModelConfig

SMALLEST_DOT = 1e-6


class Engram(nn.Module):
    """X_m += gate_m * value, with key [M, D] and value [D] projected from the token's rows.

    dot_m = sum_D(X_m * q_m * k_m * key_m) * rsqrt(mean X_m^2 + eps) * rsqrt(mean key_m^2 + eps) * D^-1/2;
    gate_m = sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))), all fp32, and 0 on dead tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        m, width = config.hc_mult, config.hidden_size
        self.streams, self.eps = m, config.rms_norm_eps
        self.wkv = nn.Linear(
            config.engram_columns * config.engram_head_dim, (m + 1) * width, bias=False
        )
        self.q_weight = nn.Parameter(torch.empty(m, width))
        self.k_weight = nn.Parameter(torch.empty(m, width))

    def forward(self, streams: Tensor, rows: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """streams [T, M, D]; rows [T, columns * head_dim]; alive [T] bool, false on padding and
        image tokens. Returns the new streams and the mean gate over live tokens (fp32 scalar)."""
        projected = self.wkv(rows.to(streams.dtype))
        key, value = projected.split([self.streams * streams.shape[-1], streams.shape[-1]], dim=-1)
        key = key.unflatten(-1, (self.streams, -1))
        gate = self._gate(streams.float(), key.float()) * alive[:, None]
        mean = gate.detach().sum() / (alive.sum().clamp_min(1) * self.streams)
        added = streams.float() + gate[:, :, None] * value.float()[:, None]
        return added.to(streams.dtype), mean

    def _gate(self, x: Tensor, key: Tensor) -> Tensor:
        weight = self.q_weight.float() * self.k_weight.float()
        dot = (x * weight * key).sum(-1)
        dot = dot * torch.rsqrt(x.square().mean(-1) + self.eps)
        dot = dot * torch.rsqrt(key.square().mean(-1) + self.eps) * x.shape[-1] ** -0.5
        return torch.sigmoid(torch.copysign(dot.abs().clamp_min(SMALLEST_DOT).sqrt(), dot))
