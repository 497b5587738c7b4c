"""Rotary positions of patches: half the channel pairs turn with the row, half with the column."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Turn2d(NamedTuple):
    """cos and sin [P, 1, head_dim / 2] fp32, one angle for each pair of channels."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, row: Tensor, col: Tensor, *, head_dim: int, theta: float) -> Turn2d:
        """angles = [row * f, col * f] with f_i = theta^(-2i / (head_dim / 2)), i < head_dim / 4."""
        half = head_dim // 2
        f = theta ** (-torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half)
        angles = torch.cat([row.float()[:, None] * f, col.float()[:, None] * f], dim=-1)[:, None]
        return cls(angles.cos(), angles.sin())

    def apply(self, x: Tensor) -> Tensor:
        """x [P, heads, head_dim]: channel i of the first half is paired with i of the second.

        Computed in fp32, returned in x's dtype."""
        a, b = x.float().chunk(2, dim=-1)
        turned = [a * self.cos - b * self.sin, b * self.cos + a * self.sin]
        return torch.cat(turned, dim=-1).to(x.dtype)
