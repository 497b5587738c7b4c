"""CSA2 attention: a local window plus compressed entries chosen by the indexer.

Four roles by layer. window: no compressed entries. source: owns compressor and indexer, publishes
compressed KV, index keys and a selection. reindex: reuses KV and keys, publishes a new selection.
reuse: reuses everything. What a source publishes belongs to one forward of one micro-batch; its
gradient is the sum over all consumers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention.attend import AttentionSettings, attend
from model.attention.compressor import Compressor
from model.attention.distillation import selection_divergence
from model.attention.indexer import Candidates, Indexer
from model.attention.recall import selection_recall
from model.config import ModelConfig
from model.layout import Documents, Layout, VisibleRange
from model.norm import RMSNorm
from model.precision import Linear
from model.quantization.cache import fp8_fake_quant, nvfp4_fake_quant
from model.recompute import as_before
from model.rope import rotate, rotation


@dataclass(frozen=True)
class AttentionContext:
    """What all layers of one micro-batch share, made once from its layout."""

    layout: Layout
    plain: Tensor  # [T, rope_dim / 2] complex64, ratio-0 layers
    yarn: Tensor  # [T, rope_dim / 2] complex64, every other layer
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
            visible={r: layout.visible(r) for r in ratios},
            documents=layout.documents() if balance else None,
            distill=distill,
            recall=recall,
        )


class SharedKV(NamedTuple):
    """What the latest sources published. Tensors of all micro-batch rows, entries flat."""

    entries: Tensor  # [G, head_dim] compressed KV; carries gradient
    keys: Tensor  # [G, index_head_dim]; carries gradient when the indexer learns
    selected: Tensor  # [T, index_topk] int64, -1 where absent
    candidates: Candidates | None

    def detached(self) -> SharedKV:
        """The same values without their graph."""
        return self._replace(entries=self.entries.detach(), keys=self.keys.detach())


class AttentionOutput(NamedTuple):
    y: Tensor  # [T, D]
    published: SharedKV | None
    index_loss: Tensor | None  # fp32 scalar, see `selection_divergence`
    index_recall: Tensor | None  # fp32 [2], see `selection_recall`


class CSAttention(nn.Module):
    """One layer's attention over x [T, D].

    A repetition gives as `known` what the first run published: the selection is taken from it, and
    entries and keys are its own, bit for bit, with the gradient of being made again.
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
        known: SharedKV | None = None,
    ) -> AttentionOutput:
        turn = context.yarn if self.ratio else context.plain
        q_latent = self.q_norm(self.wq_a(x))
        kv = rotate(self.kv_norm(self.wkv(x)), turn)
        if self.qat.window_fp8:
            kv = fp8_fake_quant(kv)
        published, queries = None, None
        if self.role in ("source", "reindex"):
            published, queries = self._publish(x, q_latent, context, shared, known)
            shared = published
        out, mass = attend(
            q_latent,
            self.wq_b.weight.to(x.dtype),
            self.wo_a.weight.to(x.dtype),
            kv,
            self.attn_sink,
            turn=turn,
            start=context.layout.start,
            entries=shared.entries if shared and self.ratio else None,
            selected=shared.selected if shared and self.ratio else None,
            settings=self.settings,
            with_mass=context.distill and published is not None,
        )
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
                recall = self._recall(q_latent, kv, context, published)
        return AttentionOutput(self.wo_b(out), published, loss, recall)

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
            if known is not None:
                entries, keys = as_before(entries, known.entries), as_before(keys, known.keys)
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
        self, q_latent: Tensor, kv: Tensor, context: AttentionContext, published: SharedKV
    ) -> Tensor:
        return selection_recall(
            q_latent,
            self.wq_b.weight.to(q_latent.dtype),
            kv,
            self.attn_sink,
            turn=context.yarn,
            start=context.layout.start,
            entries=published.entries,
            selected=published.selected,
            seen=context.visible[self.ratio],
            settings=self.settings,
        )

    def _origin(self, context: AttentionContext) -> Tensor:
        """[G] the first entry of each entry's own document (itself on padding)."""
        first = context.layout.start[:: self.ratio] // self.ratio
        own = torch.arange(len(first), device=first.device)
        return torch.where(context.layout.live[:: self.ratio], first, own)
