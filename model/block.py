"""One layer: Engram if it has one, then attention, then experts, each between mHC mixes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from model.attention.csa import AttentionContext, CSAttention, SharedKV
from model.config import ModelConfig
from model.engram.layer import Engram
from model.engram.rows import EngramRows, look_up
from model.hyper_connection import HyperConnection, expand, read
from model.moe.experts import MoE
from model.norm import RMSNorm


class BlockOutput(NamedTuple):
    """Everything a layer gives is RETURNED: lists that callers append to lose gradients once a
    sharding wrapper copies the containers of a forward's arguments."""

    streams: Tensor  # [T, M, D]
    pre: Tensor  # [T, M] fp32, the pre-mix that the next layer's attention reads with
    published: SharedKV | None
    expert_counts: Tensor  # [E] int64
    engram_gate_mean: Tensor | None  # fp32 scalar


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.engram = Engram(config) if layer in config.engram_layers else None
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = CSAttention(config, layer)
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config)

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        rows: EngramRows | None,
    ) -> BlockOutput:
        layout, gate_mean = context.layout, None
        if self.engram is not None:
            assert rows is not None, "an Engram layer needs its rows"
            found = look_up(rows.values, rows.inverse.flatten(0, 1), rows.grad_buffer)
            streams, gate_mean = self.engram(streams, found, layout.live & ~layout.image)
        mix = self.hc_attn(streams)
        y, published = self.attn(self.attn_norm(read(streams, pre)), context, shared)
        streams = expand(y, streams, mix)
        pre = mix.pre
        mix = self.hc_ffn(streams)
        y, counts = self.ffn(self.ffn_norm(read(streams, pre)), layout.live, layout.image)
        streams = expand(y, streams, mix)
        return BlockOutput(streams, mix.pre, published, counts, gate_mean)
