"""Compressed KV: every group of `ratio` tokens of a document becomes one latent entry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.norm import RMSNorm
from model.precision import wide_linear


class Compressor(nn.Module):
    """Pool x [T, D] to latents [T / ratio, head_dim], in x's dtype, before their rotation.

    ratio > 1: per feature, a softmax over the group's scores weighs its values, all in fp32 with
    fp32 weights. ratio 1: a projection in x's own dtype. An RMSNorm closes both. A group that holds
    padding or a document's cut end gives a latent that nothing may see (`Layout.visible`).
    """

    def __init__(self, config: ModelConfig, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        if ratio > 1:
            self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        if self.ratio == 1:
            return self.norm(F.linear(x, self.wkv.weight.to(x.dtype)))
        values = wide_linear(x, self.wkv.weight).unflatten(0, (-1, self.ratio))
        scores = wide_linear(x, self.wgate.weight).unflatten(0, (-1, self.ratio))
        weights = torch.softmax(scores, dim=1)
        return self.norm((values * weights).sum(1).to(x.dtype))
