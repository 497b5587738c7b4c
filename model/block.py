"""One layer: Engram if it has one, then attention, then experts, each between mHC mixes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention.csa import AttentionContext, CSAttention, KnownAttention, SharedKV
from model.config import ModelConfig, Recompute
from model.engram.layer import Engram
from model.engram.rows import EngramRows
from model.hyper_connection import HyperConnection, expand, read
from model.moe.experts import MoE
from model.norm import RMSNorm
from model.parallel.mesh import Mesh
from model.rebuild import rebuilding
from model.recompute import run_twice


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


class _Carriers(NamedTuple):
    """The parts of a layer's output that its gradient comes back by."""

    streams: Tensor | None
    pre: Tensor | None
    entries: Tensor | None
    keys: Tensor | None
    balance_loss: Tensor | None
    index_loss: Tensor | None

    @classmethod
    def of(cls, out: BlockOutput, *, source: bool, distill: bool) -> _Carriers:
        """source: the layer has made entries and keys. distill: the keys have a gradient."""
        made = out.published if source else None
        entries = None if made is None else made.entries
        keys = None if made is None or not distill else made.keys
        return cls(out.streams, out.pre, entries, keys, out.balance_loss, out.index_loss)

    def put_into(self, out: BlockOutput, shared: SharedKV | None) -> BlockOutput:
        """`out` with these tensors in place of its own, published ones of others from `shared`."""
        assert self.streams is not None and self.pre is not None
        published = out.published
        if published is not None and self.entries is not None:
            keys = published.keys if self.keys is None else self.keys
            published = published._replace(entries=self.entries, keys=keys)
        elif published is not None and shared is not None:
            published = published._replace(entries=shared.entries, keys=shared.keys)
        return out._replace(
            streams=self.streams,
            pre=self.pre,
            published=published,
            balance_loss=self.balance_loss,
            index_loss=self.index_loss,
        )


class Known(NamedTuple):
    """What a layer's first run leaves for its second: choices, which are not made again, what other
    layers have read, and what other ranks have sent."""

    attention: KnownAttention
    chosen: Tensor  # [T, k] int64, experts
    routed: Tensor | None  # [T, D], the routed experts' output


class Block(nn.Module):
    """`recompute` says what a layer keeps for backward.

    none: its entry streams, narrow latents and its halves' outputs; wide tensors in between are
    made again (and the tiles of attention and experts, where they do not fit the workspace).
    full: its entry streams and pre-mix, its choices and what it published; all else is run again.
    selective: also the routed experts' output, [T, D], which is not computed again. Of all that a
    layer could keep, it spares the most work for its size: at the released sizes half of the
    layer's products, and with expert parallelism an exchange of tokens, for a quarter of the entry
    streams' bytes.
    """

    read: Callable[[Tensor, Tensor], Tensor]
    expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        recompute: Recompute = "none",
        mesh: Mesh = Mesh(),  # noqa: B008, frozen
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.engram = Engram(config) if layer in config.engram_layers else None
        self.hc_attn = HyperConnection(config)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = CSAttention(config, layer)
        self.hc_ffn = HyperConnection(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, ep=mesh.ep)
        self.read, self.expand = read, expand

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        rows: EngramRows | None,
    ) -> BlockOutput:
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self._run(streams, pre, context, shared, rows, None)[0]
        return self._run_twice(streams, pre, context, shared, rows)

    def _run_twice(
        self,
        streams: Tensor,
        pre: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        rows: EngramRows | None,
    ) -> BlockOutput:
        first: list[BlockOutput] = []
        known: list[Known] = []

        def run(
            streams: Tensor, pre: Tensor, entries: Tensor | None, keys: Tensor | None
        ) -> _Carriers:
            own = None
            if shared is not None and entries is not None and keys is not None:
                own = shared._replace(entries=entries, keys=keys)
            out, keep = self._run(streams, pre, context, own, rows, known[0] if known else None)
            if not known:
                known.append(keep)
                first.append(out)
            return _Carriers.of(out, source=self.attn.role == "source", distill=context.distill)

        inputs = [streams, pre, *((shared.entries, shared.keys) if shared else (None, None))]
        parameters = [p for p in self.parameters() if p.requires_grad]
        carriers = _Carriers(*run_twice(run, inputs, parameters))
        # Taken out: `run` lives until backward, and is to hold nothing but what is known.
        return carriers.put_into(first.pop(), shared)

    def _run(
        self,
        streams: Tensor,
        pre: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        rows: EngramRows | None,
        known: Known | None,
    ) -> tuple[BlockOutput, Known]:
        layout, gate_mean = context.layout, None
        if self.engram is not None:
            assert rows is not None, "an Engram layer needs its rows"
            streams, gate_mean = self.engram(streams, rows, layout.live & ~layout.image)
        # A layer keeps its entry streams and narrow latents. The streams between its halves and
        # what each half reads from its streams are as wide again, and follow at little cost.
        with rebuilding(lambda: self._read(streams, pre, self.attn_norm)) as cheap:
            entered = self.hc_attn(streams, pre, self.read)
            x = cheap(self.attn_norm(cheap(entered.x)))
            before = None if known is None else known.attention
            attended = self.attn(x, context, shared, before)
        y, mix = attended.y, entered.mix
        middle = self.expand(y, entered.streams, mix.post, mix.comb)

        def make() -> list[Tensor]:
            again = self.expand(y, streams, mix.post, mix.comb)
            return [again, *self._read(again, mix.pre, self.ffn_norm)]

        with rebuilding(make) as cheap:
            entered_ffn = self.hc_ffn(cheap(middle), mix.pre, self.read)
            x = cheap(self.ffn_norm(cheap(entered_ffn.x)))
            ffn = self.ffn(
                x,
                layout.live,
                layout.image,
                context.documents,
                chosen=None if known is None else known.chosen,
                routed=None if known is None else known.routed,
            )
            mix_ffn = entered_ffn.mix
            out = self.expand(ffn.y, entered_ffn.streams, mix_ffn.post, mix_ffn.comb)
        routed = ffn.routed.detach() if self.recompute == "selective" else None
        keep = Known(attended.known, ffn.chosen, routed)
        made = BlockOutput(
            streams=out,
            pre=mix_ffn.pre,
            published=attended.published,
            expert_counts=ffn.counts,
            engram_gate_mean=gate_mean,
            balance_loss=ffn.balance,
            index_loss=attended.index_loss,
            index_recall=attended.index_recall,
        )
        return made, keep

    def _read(self, streams: Tensor, pre: Tensor, norm: RMSNorm) -> list[Tensor]:
        x = self.read(streams, pre)
        return [x, norm(x)]
