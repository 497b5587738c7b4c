"""The lightning indexer: which compressed entries each query attends to.

score(t, g) = sum_h w[t, h] * relu(q[t, h] . k[g]), each step in the activations' dtype. Scores are
S x S/ratio by nature; they are made in tiles of a bounded workspace and never kept. No gradient of
the language-model loss flows through the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention.topk import chosen_positions
from model.config import ModelConfig
from model.kernels.library import Kernels, kernels
from model.layout import VisibleRange
from model.norm import RMSNorm
from model.precision import Linear
from model.quantization.cache import mxfp4_fake_quant
from model.rope import rotate


class Candidates(NamedTuple):
    """The pool that later index sources choose from: for each query, some blocks of entries."""

    first: Tensor  # [T, blocks] int32, a block's first flat entry, ascending, -1 where absent
    block_size: int

    def entries(self, low: int, high: int, end: Tensor) -> Tensor:
        """Flat entries [high - low, blocks * size] of queries low..high; -1 where absent.

        end [high - low]: the first entry no longer visible. A document's last block may be short,
        so the test against `end` also keeps a block from reaching into the next document.
        """
        first = self.first[low:high, :, None]
        entry = first + torch.arange(self.block_size, device=first.device)
        entry = torch.where((first >= 0) & (entry < end[:, None, None]), entry, -1)
        return entry.flatten(1)


class Indexer(nn.Module):
    """Queries and head weights; a KV source also makes the keys that later sources reuse."""

    def __init__(self, config: ModelConfig, *, makes_keys: bool) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.quantised = config.qat.index_fp4
        self.topk = config.index_topk
        self.block_size, self.blocks = config.candidate_block_size, config.candidate_topk_blocks
        self.workspace_bytes = config.workspace_mb << 20
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        if makes_keys:
            self.wk = Linear(config.head_dim, self.dim)
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)

    def keys(self, latent: Tensor, turn: Tensor) -> Tensor:
        """Index keys [G, dim] from latents [G, head_dim] before their own rotation."""
        return self._quantise(rotate(self.k_norm(self.wk(latent)), turn))

    def queries(self, x: Tensor, q_latent: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, dim] and head weights [T, heads], in the activations' dtype."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        weights = self.weights_proj(x) * (self.dim**-0.5 * self.heads**-0.5)
        return self._quantise(rotate(q, turn)), weights

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        seen: VisibleRange,
        *,
        pool: Candidates | None = None,
        origin: Tensor | None = None,
    ) -> tuple[Tensor, Candidates | None]:
        """Top-k entries of each query: int64 [T, index_topk], flat, ascending, -1 where absent.

        With `pool`, only its entries are scored. With `origin` [G] int64, the first flat entry of
        each entry's own document, the pool for later sources is made from the same scores: blocks
        of `block_size` entries counted from the document's first, those with the best maxima, the
        block of the newest visible entry always among them.
        """
        if run := kernels(q, weights, keys):
            return self._choose(run, q, weights, keys, seen, pool, make=origin is not None)
        out = torch.empty(q.shape[0], self.topk, dtype=torch.int64, device=q.device)
        if pool is not None:
            for low, high in self._pool_tiles(q.shape[0], pool):
                entry = pool.entries(low, high, seen.high[low:high])
                near = keys.index_select(0, entry.clamp_min(0).flatten())
                near = near.view(*entry.shape, self.dim)
                scores = weighted(torch.bmm(q[low:high], near.mT), weights[low:high])
                scores = scores.masked_fill_(entry < 0, -torch.inf)
                # Absent entries repeat a position, but at -inf they are never chosen.
                out[low:high] = chosen_positions(scores, entry.clamp_min(0), self.topk)
            return out, pool
        blocks = []
        for low, high, first, scores in self._score_tiles(q, weights, keys, seen):
            position = torch.arange(first, first + scores.shape[1], device=q.device)
            out[low:high] = chosen_positions(scores, position, self.topk)
            if origin is not None:
                rows = VisibleRange(seen.low[low:high], seen.high[low:high])
                blocks.append(self._best_blocks(scores, position, rows, origin))
        if origin is None:
            return out, None
        width = max(part.shape[1] for part in blocks)
        padded = [F.pad(part, (0, width - part.shape[1]), value=-1) for part in blocks]
        return out, Candidates(torch.cat(padded), self.block_size)

    def _choose(
        self,
        run: Kernels,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        seen: VisibleRange,
        pool: Candidates | None,
        *,
        make: bool,
    ) -> tuple[Tensor, Candidates | None]:
        """`select` by the kernel. Each document's blocks begin where its queries' view does, at
        seen.low."""
        out = torch.empty(len(q), self.topk, dtype=torch.int64)
        kept = torch.empty(len(q), self.blocks, dtype=torch.int32) if make else None
        sizes = *q.shape, len(keys), self.topk, self.block_size, self.blocks
        tensors = [t.contiguous() for t in (q, weights, keys, seen.low, seen.high)]
        run.run("choose_entries", *sizes, *tensors, pool and pool.first, out, kept)
        return out, pool if kept is None else Candidates(kept, self.block_size)

    def _best_blocks(
        self, scores: Tensor, position: Tensor, seen: VisibleRange, origin: Tensor
    ) -> Tensor:
        """First entries (int32 [Q, up to `blocks`], ascending, -1 absent) of the kept blocks.

        scores [Q, n] of the flat entries `position`, which begin at a document's first entry.
        """
        size = scores.shape[1]
        starts = position[(position - origin[position]) % self.block_size == 0]
        member = starts[:, None] + torch.arange(self.block_size, device=position.device)
        inside = member <= position[-1]
        inside &= origin[member.clamp_max(len(origin) - 1)] == origin[starts][:, None]
        column = torch.where(inside, member - position[0], size).flatten()
        open_end = F.pad(scores, (0, 1), value=-torch.inf)
        best = open_end[:, column].view(-1, *member.shape).amax(-1)
        newest = seen.high[:, None] - 1
        forced = (newest >= starts) & (newest < starts + self.block_size)
        forced &= origin[newest.clamp_min(0)] == origin[starts]
        forced &= seen.high[:, None] > seen.low[:, None]
        best = best.masked_fill_(forced, torch.inf)
        return chosen_positions(best, starts, min(self.blocks, len(starts))).int()

    def _score_tiles(
        self, q: Tensor, weights: Tensor, keys: Tensor, seen: VisibleRange
    ) -> Iterator[tuple[int, int, int, Tensor]]:
        """(low, high, first entry, scores [high - low, n]); -inf where not visible.

        A tile scores only the stretch of entries that some query of it can see: for packed
        documents that is the sum of their squares, not the square of the sum.
        """
        tokens = q.shape[0]
        # Entries that any one query of the row sees bound the widest tile.
        spread = int((seen.high - seen.low).max().clamp_min(1))
        per_query = spread * 4 * 8
        rows = max(1, min(256, self.workspace_bytes // (2 * per_query)))
        edges = torch.arange(0, tokens, rows, device=q.device)
        tile = torch.arange(tokens, device=q.device) // rows
        some = seen.high > seen.low
        huge = torch.iinfo(torch.int64).max
        first = torch.full_like(edges, huge).scatter_reduce(
            0, tile, torch.where(some, seen.low, huge), "amin"
        )
        last = torch.zeros_like(edges).scatter_reduce(0, tile, seen.high * some, "amax")
        bounds = torch.stack([edges, first, last]).tolist()
        for low, begin, end in zip(*bounds, strict=True):
            high = min(low + rows, tokens)
            if end == 0:
                yield low, high, 0, q.new_full((high - low, 1), -torch.inf)
                continue
            scores = self._dense(q[low:high], weights[low:high], keys[begin:end])
            entry = torch.arange(begin, end, device=q.device)
            hidden = (entry < seen.low[low:high, None]) | (entry >= seen.high[low:high, None])
            yield low, high, begin, scores.masked_fill_(hidden, -torch.inf)

    def _dense(self, q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """[Q, n] scores; the [Q, heads, n] products exist for a stretch of entries at a time."""
        size = q.element_size()
        stretch = self.workspace_bytes // (2 * size * q.shape[0] * self.heads)
        flat = q.flatten(0, 1)
        parts = [
            weighted((flat @ part.t()).unflatten(0, q.shape[:2]), weights)
            for part in keys.split(max(stretch, 1))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _pool_tiles(self, tokens: int, pool: Candidates) -> Iterator[tuple[int, int]]:
        width = pool.first.shape[1] * pool.block_size
        per_query = width * (4 * self.dim + 4 * self.heads + 24)
        rows = max(1, self.workspace_bytes // per_query)
        return ((low, min(low + rows, tokens)) for low in range(0, tokens, rows))

    def _quantise(self, x: Tensor) -> Tensor:
        return mxfp4_fake_quant(x) if self.quantised else x


def weighted(products: Tensor, weights: Tensor) -> Tensor:
    """sum_h w_h * relu(products_h): [Q, heads, n] and [Q, heads] -> [Q, n]."""
    return products.relu_().mul_(weights[..., None]).sum(1)
