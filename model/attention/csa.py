"""CSA2 attention: a local window plus compressed entries chosen by the indexer.

Four roles by layer. window: no compressed entries. source: owns compressor and indexer, publishes
compressed KV, index keys and a selection. reindex: reuses KV and keys, publishes a new selection.
reuse: reuses everything. What a source publishes belongs to one forward of one micro-batch; its
gradient is the sum over all consumers.

Where a context group of ranks divides the columns of a row, window keys come from the ranks to the
left in every layer, and what a source makes of its own columns is gathered once, there: published
entries and keys are those of whole rows on every rank, in their usual order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention.attend import AttentionSettings, attend
from model.attention.compressor import Compressor
from model.attention.distillation import selection_divergence
from model.attention.indexer import Candidates, Indexer
from model.attention.recall import recall_probes, selection_recall
from model.config import ModelConfig
from model.layout import Documents, Layout, VisibleRange
from model.norm import RMSNorm
from model.parallel.gather import gather
from model.parallel.halo import halo
from model.precision import Linear
from model.quantization.cache import fp8_fake_quant, nvfp4_fake_quant
from model.rope import rotate, rotation


@dataclass(frozen=True)
class AttentionContext:
    """What all layers of one micro-batch share, made once from its layout."""

    layout: Layout
    plain: Tensor  # [T, rope_dim / 2] complex64, ratio-0 layers
    yarn: Tensor  # [T, rope_dim / 2] complex64, every other layer
    window_start: tuple[Tensor, ...]  # see `Layout.window_start`
    visible: dict[int, VisibleRange]  # by ratio
    documents: Documents | None = None  # when the experts' balance loss is wanted
    distill: bool = False  # whether index sources give what their indexer learns from
    recall: bool = False  # whether they then also measure its recall

    @classmethod
    def of(
        cls,
        layout: Layout,
        plain: Tensor,
        yarn: Tensor,
        ratios: tuple[int, ...],
        *,
        balance: bool = False,
        distill: bool = False,
        recall: bool = False,
    ) -> AttentionContext:
        return cls(
            layout=layout,
            plain=rotation(plain, layout.position),
            yarn=rotation(yarn, layout.position),
            window_start=layout.window_start.unbind(),
            visible={r: layout.visible(r) for r in ratios},
            documents=layout.documents() if balance else None,
            distill=distill,
            recall=recall,
        )


class SharedKV(NamedTuple):
    """What the latest sources published. Entries and keys of all micro-batch rows, flat."""

    entries: Tensor  # [G, head_dim] compressed KV; carries gradient
    keys: Tensor  # [G, index_head_dim]; carries gradient when the indexer learns
    selected: Tensor  # [T, index_topk] int64, -1 where absent
    candidates: Candidates | None

    def detached(self) -> SharedKV:
        """The same values without their graph."""
        return self._replace(entries=self.entries.detach(), keys=self.keys.detach())


class KnownAttention(NamedTuple):
    """What a first run leaves for its repetition: what it has chosen, and what came from others."""

    published: SharedKV | None  # without graph
    halo: Tensor | None  # [stretches, window - 1, head_dim], where columns are divided


class AttentionOutput(NamedTuple):
    y: Tensor  # [T, D]
    published: SharedKV | None
    known: KnownAttention
    index_loss: Tensor | None  # fp32 scalar, see `selection_divergence`
    index_recall: Tensor | None  # fp32 [2], see `selection_recall`


class CSAttention(nn.Module):
    """One layer's attention over x [T, D].

    A repetition gives the first run's `known`: the selection is taken from it, and entries, keys
    and halo are its own, bit for bit, with the gradient of being made again; nothing is sent in
    its forward.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.role = config.role(layer)
        self.ratio = config.ratio(layer)
        self.makes_candidates = layer == config.candidate_source_layer_id
        self.uses_candidates = config.uses_candidates(layer)
        self.qat = config.qat
        self.settings = AttentionSettings(
            heads=config.num_attention_heads,
            window=config.sliding_window,
            groups=config.o_groups,
            workspace_bytes=config.workspace_mb << 20,
        )
        eps, width = config.rms_norm_eps, config.hidden_size
        heads_width = config.num_attention_heads * config.head_dim
        self.wq_a = Linear(width, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, eps)
        self.wq_b = Linear(config.q_lora_rank, heads_width)
        self.wkv = Linear(width, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, eps)
        group_width = heads_width // config.o_groups
        self.wo_a = Linear(group_width, config.o_groups * config.o_lora_rank)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, width)
        self.attn_sink = nn.Parameter(torch.empty(config.num_attention_heads))
        if self.role == "source":
            self.compressor = Compressor(config, self.ratio)
        if self.role in ("source", "reindex"):
            self.indexer = Indexer(config, makes_keys=self.role == "source")

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        known: KnownAttention | None = None,
    ) -> AttentionOutput:
        turn = context.yarn if self.ratio else context.plain
        q_latent = self.q_norm(self.wq_a(x))
        kv = rotate(self.kv_norm(self.wkv(x)), turn)
        if self.qat.window_fp8:
            kv = fp8_fake_quant(kv)
        near, before = self._near(kv, context, None if known is None else known.halo)
        published, queries = None, None
        if self.role in ("source", "reindex"):
            again = None if known is None else known.published
            published, queries = self._publish(x, q_latent, context, shared, again)
            shared = published
        with_mass = context.distill and published is not None
        out, mass = self._attend(q_latent, near, turn, context, shared, with_mass=with_mass)
        loss = recall = None
        if mass is not None:
            assert published is not None and queries is not None
            loss = selection_divergence(
                *queries,
                published.keys,
                published.selected,
                mass,
                workspace_bytes=self.settings.workspace_bytes,
            )
            if context.recall and known is None:
                recall = self._recall(q_latent, near, context, published)
        kept = KnownAttention(None if published is None else published.detached(), before)
        return AttentionOutput(self.wo_b(out), published, kept, loss, recall)

    def _near(
        self, kv: Tensor, context: AttentionContext, known: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """Window keys of each stretch of tokens, and what of them came from other ranks."""
        columns = context.layout.columns
        if not columns.divided:
            return [kv], None
        before = halo(kv, columns, width=self.settings.window - 1, known=known)
        near = [torch.cat(both) for both in zip(before, columns.split(kv), strict=True)]
        return near, before.detach()

    def _attend(
        self,
        q_latent: Tensor,
        near: Sequence[Tensor],
        turn: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        *,
        with_mass: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend`, one stretch of tokens after the other; one of a row sees the row's entries."""
        split, far = context.layout.columns.split, shared if self.ratio else None
        weights = self.wq_b.weight.to(q_latent.dtype), self.wo_a.weight.to(q_latent.dtype)
        entries: Sequence[Tensor | None] = [None] * len(near)
        selected: Sequence[Tensor | None] = entries
        if far is not None:
            each = len(far.entries) // len(near)
            entries = split(far.entries)
            selected = [
                _counted_from(number * each, chosen)
                for number, chosen in enumerate(split(far.selected))
            ]
        parts = [
            attend(
                q,
                *weights,
                kv,
                self.attn_sink,
                turn=own_turn,
                start=start,
                entries=own,
                selected=chosen,
                settings=self.settings,
                with_mass=with_mass,
            )
            for q, kv, own_turn, start, own, chosen in zip(
                split(q_latent),
                near,
                split(turn),
                context.window_start,
                entries,
                selected,
                strict=True,
            )
        ]
        if len(parts) == 1:
            return parts[0]
        mass = [m for _, m in parts if m is not None]
        return torch.cat([out for out, _ in parts]), torch.cat(mass) if mass else None

    def _publish(
        self,
        x: Tensor,
        q_latent: Tensor,
        context: AttentionContext,
        shared: SharedKV | None,
        known: SharedKV | None,
    ) -> tuple[SharedKV, tuple[Tensor, Tensor]]:
        """What later layers read, and the index queries and head weights that selected."""
        seen = context.visible[self.ratio]
        # The entry of group g stands at position g * ratio of its document.
        group_turn = context.yarn[:: self.ratio]
        if self.role == "source":
            latent = self.compressor(x)
            entries = rotate(latent, group_turn)
            if self.qat.main_fp4:
                entries = nvfp4_fake_quant(entries)
            keys = self.indexer.keys(latent.detach(), group_turn)
            columns = context.layout.columns
            entries = gather(entries, columns, known=known and known.entries)
            keys = gather(keys, columns, known=known and known.keys)
            pool = None
        else:
            assert shared is not None, "a reindexing layer follows a KV source"
            entries, keys, pool = shared.entries, shared.keys, shared.candidates
        q, weights = self.indexer.queries(x.detach(), q_latent.detach(), context.yarn)
        if known is not None:
            return known._replace(entries=entries, keys=keys), (q, weights)
        with torch.no_grad():
            selected, made = self.indexer.select(
                q,
                weights,
                keys,
                seen,
                pool=pool if self.uses_candidates else None,
                origin=self._origin(context) if self.makes_candidates else None,
            )
        pool = made if self.makes_candidates else pool
        return SharedKV(entries, keys, selected, pool), (q, weights)

    def _recall(
        self,
        q_latent: Tensor,
        near: Sequence[Tensor],
        context: AttentionContext,
        published: SharedKV,
    ) -> Tensor:
        layout, seen = context.layout, context.visible[self.ratio]
        whole = torch.zeros_like(layout.whole.live)
        whole[recall_probes(layout.whole.visible(self.ratio), topk=self.indexer.topk)] = True
        split = layout.columns.split
        parts = zip(
            split(q_latent),
            near,
            split(layout.columns.own(whole)),
            split(context.yarn),
            context.window_start,
            split(published.selected),
            split(seen.low),
            split(seen.high),
            strict=True,
        )
        shares = [
            selection_recall(
                q,
                self.wq_b.weight.to(q_latent.dtype),
                kv,
                self.attn_sink,
                probes=probes.nonzero()[:, 0],
                turn=turn,
                start=start,
                entries=published.entries,
                selected=selected,
                seen=VisibleRange(low, high),
                settings=self.settings,
            )
            for q, kv, probes, turn, start, selected, low, high in parts
        ]
        return torch.stack(shares).sum(0)

    def _origin(self, context: AttentionContext) -> Tensor:
        """[G] the first entry of each entry's own document (itself on padding)."""
        whole = context.layout.whole
        first = whole.start[:: self.ratio] // self.ratio
        own = torch.arange(len(first), device=first.device)
        return torch.where(whole.live[:: self.ratio], first, own)


def _counted_from(first: int, selected: Tensor) -> Tensor:
    """Flat entries as places behind the entry `first`; -1 stays."""
    return selected if first == 0 else torch.where(selected < 0, selected, selected - first)
