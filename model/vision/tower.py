"""The image tower: a transformer over patches in which every image sees itself alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import Recompute, VisionConfig
from model.norm import RMSNorm
from model.precision import Linear
from model.recompute import run_twice
from model.vision.packing import PackedImages
from model.vision.rotary import Turn2d

EPS = 1e-6


class VisionTower(nn.Module):
    """Patches of several images [P, 3 * patch^2] -> features [P, hidden_size], in their order.

    Images of equal patch count share one attention call, batched; there is no mask and nothing of
    the size of all patches squared. `recompute`: see `VisionBlock`.
    """

    def __init__(self, config: VisionConfig, *, recompute: Recompute = "none") -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.theta = config.rope_theta
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(
            VisionBlock(config, recompute=recompute) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, EPS, fp32_weight=True)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """grids [n, 2] int64: patch rows and columns of each image."""
        packed = PackedImages.of(grids)
        turn = Turn2d.of(packed.row, packed.col, head_dim=self.head_dim, theta=self.theta)
        x = self.patch_embed(patches[packed.order])
        for block in self.blocks:
            x = block(x, turn, packed.buckets)
        return self.norm(x)[packed.inverse]


class PatchEmbed(nn.Module):
    """A linear map of each patch's pixels."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Linear(3 * config.patch_size**2, config.hidden_size, bias=True)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)


class VisionBlock(nn.Module):
    """x += attention(norm1 x); x += mlp(norm2 x).

    With `recompute` (full or selective) backward runs it again from x, which alone is kept.
    """

    def __init__(self, config: VisionConfig, *, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.norm1 = RMSNorm(config.hidden_size, EPS, fp32_weight=True)
        self.attn = VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, EPS, fp32_weight=True)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor, turn: Turn2d, buckets: list[tuple[int, int]]) -> Tensor:
        def run(x: Tensor) -> tuple[Tensor]:
            x = x + self.attn(self.norm1(x), turn, buckets)
            return (x + self.mlp(self.norm2(x)),)

        if self.recompute == "none" or not torch.is_grad_enabled():
            return run(x)[0]
        (out,) = run_twice(run, [x], list(self.parameters()))
        assert out is not None
        return out


class VisionAttention(nn.Module):
    """Full attention inside each image, over x [P, D] whose images lie in `buckets`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.wqkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.wo = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, turn: Turn2d, buckets: list[tuple[int, int]]) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = turn.apply(q), turn.apply(k)
        sizes = [images * size for images, size in buckets]
        parts = zip(buckets, *(t.split(sizes) for t in (q, k, v)), strict=True)
        out = []
        for (images, size), *qkv in parts:
            # [images * size, heads, head_dim] -> [images, heads, size, head_dim]
            one = [t.unflatten(0, (images, size)).transpose(1, 2) for t in qkv]
            out.append(F.scaled_dot_product_attention(*one).transpose(1, 2).flatten(0, 1))
        return self.wo(torch.cat(out).flatten(1))


class VisionMLP(nn.Module):
    """w2(silu(gate) * up), gate and up from one product; no biases, no clamp."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.w2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)
