"""From patches to the language model's tokens: downsample^2 patches become one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.precision import Linear
from model.vision.packing import cell_patches


class Aligner(nn.Module):
    """Features [P, vision width] -> [cells of all images, D]: w2(gelu(w1 cell)), exact GELU.

    A cell is downsample x downsample patches, channel by channel; what reaches over the edge of an
    image is zero.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.downsample = config.vision.downsample_ratio
        width = config.vision.hidden_size * self.downsample**2
        self.w1 = Linear(width, config.hidden_size, bias=True)
        self.w2 = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, features: Tensor, grids: Tensor) -> Tensor:
        cells = F.pad(features, (0, 0, 0, 1))[cell_patches(grids, self.downsample)]
        return self.w2(F.gelu(self.w1(cells.transpose(1, 2).flatten(1))))
