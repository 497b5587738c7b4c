"""One layer: Engram if it has one, then attention, then experts, each between mHC mixes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from model.attention.csa import AttentionContext, CSAttention, SharedKV
from model.config import ModelConfig
from model.engram.layer import Engram
from model.engram.rows import EngramRows
from model.hyper_connection import HyperConnection, expand, read
from model.moe.experts import MoE
from model.norm import RMSNorm
from model.rebuild import rebuilding


class BlockOutput(NamedTuple):
    """Everything a layer gives is RETURNED: lists that callers append to lose gradients once a
    sharding wrapper copies the containers of a forward's arguments."""

    streams: Tensor  # [T, M, D]
    pre: Tensor  # [T, M] fp32, the pre-mix that the next layer's attention reads with
    published: SharedKV | None
    expert_counts: Tensor  # [2, E] int64, tokens of text and of images
    engram_gate_mean: Tensor | None  # fp32 scalar
    balance_loss: Tensor | None  # fp32 scalar, see `balance_sum`
    index_loss: Tensor | None  # fp32 scalar, see `selection_divergence`
    index_recall: Tensor | None  # fp32 [2], see `selection_recall`


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
            streams, gate_mean = self.engram(streams, rows, layout.live & ~layout.image)
        # A layer keeps its entry streams and narrow latents. The streams between its halves and
        # what each half reads from its streams are as wide again, and follow at little cost.
        with rebuilding(lambda: self._read(streams, pre, self.attn_norm)) as cheap:
            mix = self.hc_attn(streams)
            x = cheap(self.attn_norm(cheap(read(streams, pre))))
            y, published, index_loss, index_recall = self.attn(x, context, shared)
        middle = expand(y, streams, mix)

        def make() -> list[Tensor]:
            again = expand(y, streams, mix)
            return [again, *self._read(again, mix.pre, self.ffn_norm)]

        with rebuilding(make) as cheap:
            mix_ffn = self.hc_ffn(cheap(middle))
            x = cheap(self.ffn_norm(cheap(read(middle, mix.pre))))
            ffn = self.ffn(x, layout.live, layout.image, context.documents)
            out = expand(ffn.y, middle, mix_ffn)
        return BlockOutput(
            streams=out,
            pre=mix_ffn.pre,
            published=published,
            expert_counts=ffn.counts,
            engram_gate_mean=gate_mean,
            balance_loss=ffn.balance,
            index_loss=index_loss,
            index_recall=index_recall,
        )

    def _read(self, streams: Tensor, pre: Tensor, norm: RMSNorm) -> list[Tensor]:
        x = read(streams, pre)
        return [x, norm(x)]
