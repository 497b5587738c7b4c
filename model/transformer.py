"""The whole model: embedding, images, layers over M streams, fp32 head and loss."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.csa import AttentionContext, SharedKV
from model.block import Block
from model.compiled import install
from model.config import CompileConfig, ModelConfig, Recompute
from model.engram.rows import EngramRows
from model.hyper_connection import read
from model.layout import Layout, ModelInputs, pad_rows
from model.loss import cross_entropy_sum
from model.norm import RMSNorm
from model.parallel.columns import Columns
from model.parallel.mesh import Mesh
from model.rope import plain_frequencies, yarn_frequencies
from model.vision.aligner import Aligner
from model.vision.spans import END, NEWLINE, START, blank_image, fill_spans, require_sound
from model.vision.spread import own_images, to_spans
from model.vision.tower import VisionTower


class ForwardOutput(NamedTuple):
    loss_sum: Tensor | None  # fp32 scalar, summed over valid labels; None without labels
    logits: Tensor | None  # [B, S, V] fp32; None with labels or without the head
    hidden: Tensor | None  # [B, S, D], what the head reads; only without the head
    expert_counts: Tensor  # [L, 2, E] int64, routed tokens of text and of images
    engram_gate_mean: Tensor  # [Engram layers] fp32, over live text tokens
    balance_loss: Tensor | None = None  # fp32 scalar, `balance_sum` over all layers
    index_loss: Tensor | None = None  # fp32 scalar: divergence, summed over layers and queries
    index_recall: Tensor | None = None  # fp32 [2]: shares summed over layers, queries measured


class Head(nn.Module):
    """The output projection, fp32 whatever the model's type; a module so that it can be sharded
    apart from the rest."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.workspace_bytes = config.workspace_mb << 20

    def forward(self, hidden: Tensor, labels: Tensor | None) -> Tensor:
        """hidden [T, D] -> summed loss over labels [T], or logits [T, V] without them."""
        if labels is None:
            return F.linear(hidden.float(), self.weight)
        return cross_entropy_sum(hidden, self.weight, labels, workspace_bytes=self.workspace_bytes)


class DeepseekV41(nn.Module):
    """DeepSeek-V4.1 over packed rows of documents.

    forward takes [B, S] inputs; S need not be a multiple of the alignment, rows are widened with
    padding inside. `engram` holds one EngramRows for each Engram layer, in layer order. `balance`
    asks for the experts' balance loss, `recall` for index_recall; without `head` there are hidden
    states in place of loss or logits. ValueError for images that do not fit the inputs' spans, or
    that a model without a tower is given.

    Where the mesh has a context group, a rank is given its stretch of the columns (`ModelInputs`;
    of labels and Engram rows too): as wide as any other's, and a multiple of the alignment. Outputs
    are of its tokens; losses, counts and gradients are to be summed over the group. Whole rows are
    computed as without a group.

    The indexer has no gradient from the language-model loss. With `distill` it learns from
    index_loss, which a forward without gradients does not compute; otherwise it is frozen.
    `recompute`: see `Block`. `mesh`: the ranks that run this model together.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        distill: bool = False,
        recompute: Recompute = "none",
        mesh: Mesh = Mesh(),  # noqa: B008, frozen
    ) -> None:
        super().__init__()
        self.config, self.distill, self.cp = config, distill, mesh.cp
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, n, recompute=recompute, mesh=mesh)
            for n in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Head(config)
        self.vision = self.aligner = None
        if config.vision.num_hidden_layers:
            self.vision = VisionTower(config.vision, recompute=recompute)
            self.aligner = Aligner(config)
            self.image_start = nn.Parameter(torch.empty(config.hidden_size))
            self.image_newline = nn.Parameter(torch.empty(config.hidden_size))
            self.image_end = nn.Parameter(torch.empty(config.hidden_size))
        for name, parameter in self.named_parameters():
            if ".indexer." in name:
                parameter.requires_grad_(distill)
        self.train()

    @property
    def device(self) -> torch.device:
        """Where it computes, and wants its inputs."""
        return self.head.weight.device

    def train(self, mode: bool = True) -> Self:
        """Training uses the compiled functions that the configuration names; evaluation, whose
        shapes come and go, uses the plain ones."""
        super().train(mode)
        install(self.layers, self.norm, self.config.compile if mode else CompileConfig())
        return self

    def forward(
        self,
        inputs: ModelInputs,
        *,
        engram: list[EngramRows],
        labels: Tensor | None = None,
        balance: bool = False,
        recall: bool = False,
        head: bool = True,
    ) -> ForwardOutput:
        c = self.config
        rows, columns = inputs.input_ids.shape
        divided = self._divided(inputs)
        width = columns + -columns % c.alignment
        wide = pad_rows(inputs, width, pad_token_id=c.pad_token_id)
        engram = [_pad_engram(r, width) for r in engram]
        context = AttentionContext.of(
            Layout.of(wide, divided),
            plain_frequencies(c).to(wide.input_ids.device),
            yarn_frequencies(c).to(wide.input_ids.device),
            c.active_ratios,
            balance=balance,
            distill=self.distill and torch.is_grad_enabled(),
            recall=recall,
        )
        hidden, out = self._run_layers(self._embed(wide, divided), context, engram)
        if not head:
            return out._replace(hidden=hidden.unflatten(0, (rows, width))[:, :columns])
        if labels is None:
            logits = self.head(hidden, None).unflatten(0, (rows, width))[:, :columns]
            return out._replace(logits=logits)
        flat = F.pad(labels, (0, width - columns), value=-100).flatten()
        return out._replace(loss_sum=self.head(hidden, flat))

    def _divided(self, inputs: ModelInputs) -> Columns:
        """Which columns of whole rows the inputs hold."""
        (rows, n), (_, width) = inputs.input_ids.shape, inputs.seq_ids.shape
        if n == width:
            return Columns()
        if n * self.cp.size != width or n % self.config.alignment:
            raise ValueError(
                f"a rank's {n} of {width} columns are not one of {self.cp.size} equal stretches of "
                f"a multiple of {self.config.alignment}: divide rows with Batch.shard"
            )
        return Columns(self.cp, rows)

    def _embed(self, inputs: ModelInputs, columns: Columns) -> Tensor:
        """[T, D]: token embeddings, those of image spans replaced by what stands there."""
        # The rows are rounded, not the table: its gradient sums up in fp32.
        x = self.embed(inputs.input_ids.flatten()).to(getattr(torch, self.config.dtype))
        images, vision = inputs.images, self.config.vision
        if self.vision is None or self.aligner is None:
            if images is not None:
                raise ValueError(
                    "this model was given images but has no vision tower: "
                    "set vision.num_hidden_layers above 0, or leave the images out"
                )
            return x
        types, seen = inputs.token_types.flatten(), images and own_images(images, columns)
        if seen is not None:
            require_sound(seen, vision)
            patches = seen.patches.to(x.dtype)
            features = self.aligner(self.vision(patches, seen.grids), seen.grids)
        elif self.training or images is not None:
            # Another rank may have images: all must run the same sharded modules, or their
            # collectives never meet. It also keeps a zero gradient from being none at all.
            blank = blank_image(vision, like=x)
            features = self.aligner(self.vision(blank.patches, blank.grids), blank.grids)[:0]
        else:
            features = x[:0]
        if images is not None and columns.divided:
            downsample = vision.downsample_ratio
            features = to_spans(features, images, types, columns, downsample=downsample)
        delimiters = {START: self.image_start, NEWLINE: self.image_newline, END: self.image_end}
        return fill_spans(x, columns.own(types), features, delimiters)

    def _run_layers(
        self, x: Tensor, context: AttentionContext, engram: list[EngramRows]
    ) -> tuple[Tensor, ForwardOutput]:
        c = self.config
        streams = x[:, None].expand(-1, c.hc_mult, -1).contiguous()
        first = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        pre = F.one_hot(first, c.hc_mult).float()
        row_of = dict(zip(c.engram_layers, engram, strict=True))
        shared: SharedKV | None = None
        counts, gates = [], []
        balances, index_losses, recalls = [], [], []
        for n, layer in enumerate(self.layers):
            out = layer(streams, pre, context, shared, row_of.get(n))
            streams, pre = out.streams, out.pre
            shared = out.published or shared
            counts.append(out.expert_counts)
            if out.engram_gate_mean is not None:
                gates.append(out.engram_gate_mean)
            if out.balance_loss is not None:
                balances.append(out.balance_loss)
            if out.index_loss is not None:
                index_losses.append(out.index_loss)
            if out.index_recall is not None:
                recalls.append(out.index_recall)
        hidden = self.norm(read(streams, pre))
        return hidden, ForwardOutput(
            loss_sum=None,
            logits=None,
            hidden=None,
            expert_counts=torch.stack(counts),
            engram_gate_mean=torch.stack(gates) if gates else hidden.new_zeros(0),
            balance_loss=torch.stack(balances).sum() if balances else None,
            index_loss=torch.stack(index_losses).sum() if index_losses else None,
            index_recall=torch.stack(recalls).sum(0) if recalls else None,
        )


def _pad_engram(rows: EngramRows, width: int) -> EngramRows:
    """Row 0 for the new columns: their gate is 0, so nothing is read from it or added to it."""
    extra = width - rows.inverse.shape[1]
    if extra == 0:
        return rows
    return EngramRows(rows.values, F.pad(rows.inverse, (0, 0, 0, extra)), rows.grad_buffer)
