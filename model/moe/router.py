"""The router: fp32 scores, a choice steered by per-modality biases, normalised weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.layout import Documents
from model.moe.balance import SMALLEST_SUM, balance_sum
from model.precision import wide_linear
from model.tally import tally


class Routing(NamedTuple):
    """For T tokens and k experts each."""

    experts: Tensor  # [T, k] int64; n_routed_experts on padding, which is not routed
    weights: Tensor  # [T, k] fp32, with gradient to the router
    counts: Tensor  # [2, E] int64 tokens per expert, of text and of images; padding not counted
    balance: Tensor | None = None  # fp32 scalar, see `balance_sum`


class Router(nn.Module):
    """s = sqrt(softplus(gate x)); top-k of s + bias; weights = s_chosen / sum * scaling.

    All fp32, with gate's weights rounded to x's dtype.

    The biases (`bias` for text, `bias_vl` for tokens of image spans) only steer the choice and have
    no gradient: they are buffers.
    """

    bias: Tensor
    bias_vl: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.experts = config.n_routed_experts
        self.k = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(self.experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(self.experts))
        self.register_buffer("bias_vl", torch.zeros(self.experts))

    def forward(
        self,
        x: Tensor,
        live: Tensor,
        image: Tensor,
        documents: Documents | None = None,
        *,
        chosen: Tensor | None = None,
    ) -> Routing:
        """x [T, D]; live and image [T] bool. With `documents`, also their balance loss. `chosen`:
        the experts of an earlier routing, [T, k], instead of a choice."""
        soft = F.softplus(wide_linear(x, self.weight.to(x.dtype)))
        # Below a logit of about -104 it is 0, where the root's slope would turn a zero gradient
        # into NaN, of chosen and other experts alike.
        nothing = soft == 0
        scores = soft.masked_fill(nothing, 1.0).sqrt().masked_fill(nothing, 0.0)
        if chosen is None:
            with torch.no_grad():
                bias = torch.where(image[:, None], self.bias_vl, self.bias)
                chosen = (scores + bias).topk(self.k, dim=-1).indices
        chosen = chosen.clamp_max(self.experts - 1)  # padding tokens may take any
        picked = scores.gather(-1, chosen)
        weights = picked / (picked.sum(-1, keepdim=True) + SMALLEST_SUM) * self.scaling
        experts = chosen.masked_fill(~live[:, None], self.experts)
        return Routing(
            experts,
            weights,
            counts=self._counts(experts, image),
            balance=None if documents is None else balance_sum(scores, experts, documents),
        )

    def _counts(self, experts: Tensor, image: Tensor) -> Tensor:
        columns = self.experts + 1
        place = experts + columns * image[:, None]
        found = tally(place, size=2 * columns)
        return found.view(2, columns)[:, : self.experts]
