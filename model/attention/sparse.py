"""The attention kernel: sliding window plus selected entries plus sink, in one softmax, in tiles.

Memory is bounded by a workspace, never by S: queries go tile by tile, backward rebuilds each tile's
probabilities, and nothing of shape [heads, S, S] or [heads, S, groups] exists. At a fixed window and
top-k the cost grows linearly with the number of tokens. Products, softmax and sums are fp32.

Window keys are not gathered token by token: a block of c consecutive queries shares the
c + window - 1 keys before and inside it, a dense product with a band mask (two useful keys of three
or better at c = window, but at the speed of a matrix product).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_BLOCK = 32  # below this the dense products are too small to be fast


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    start: Tensor,
    *,
    window: int,
    workspace_bytes: int,
    entries: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """Softmax over window keys, selected compressed entries and a sink; scale head_dim^-1/2.

    q [T, H, d]; kv [T, d], one head that serves as key and value; sink [H] fp32 logits that enter
    the denominator only; start [T] int64, the first flat index a query may look at (t + 1 where it
    may look at nothing: the output is then 0); entries [G, d] with selected [T, K] int64, flat entry
    indices, -1 where absent. Returns [T, H, d] in q's dtype. Gradients go to q, kv, sink, entries;
    those of kv and entries are summed in fp32 in a fixed order.
    """
    settings = _Settings(window, workspace_bytes)
    if entries is None:
        return _SparseAttention.apply(q, kv, sink, start, None, None, settings)
    return _SparseAttention.apply(q, kv, sink, start, entries, selected, settings)


@dataclass(frozen=True)
class _Settings:
    window: int
    workspace_bytes: int

    @property
    def block(self) -> int:
        """Queries that share one dense stretch of window keys; at least the window."""
        return max(self.window, SMALLEST_BLOCK)

    @property
    def span(self) -> int:
        """Window keys that one block of queries can reach."""
        return self.block + self.window - 1

    def tiles(self, tokens: int, heads: int, dim: int, chosen: int) -> Iterator[tuple[int, int]]:
        """Query ranges whose temporaries of the backward pass fit the workspace."""
        per_token = 4 * (4 * heads * (1 + self.span + chosen) + 3 * chosen * dim + 4 * heads * dim)
        blocks = max(1, self.workspace_bytes // (per_token * self.block))
        step = blocks * self.block
        for low in range(0, tokens, step):
            yield low, min(low + step, tokens)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, sink, start, entries, selected, settings):  # type: ignore[override]
        ctx.save_for_backward(q, kv, sink, start, entries, selected)
        ctx.settings = settings
        whole = _Padded.of(q, kv, start, entries, selected, settings)
        out = torch.empty_like(whole.q)
        for low, high in whole.tiles():
            tile = _Tile(whole, sink, low, high)
            out[low:high] = tile.weighted_sum()
        return out[: q.shape[0]]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        q, kv, sink, start, entries, selected = ctx.saved_tensors
        whole = _Padded.of(q, kv, start, entries, selected, ctx.settings)
        grad = F.pad(grad, (0, 0, 0, 0, 0, whole.q.shape[0] - q.shape[0]))
        grad_q = torch.empty_like(whole.q)
        grad_kv = torch.zeros_like(whole.kv)
        grad_sink = torch.zeros_like(sink, dtype=torch.float32)
        grad_entries = None if entries is None else torch.zeros_like(entries, dtype=torch.float32)
        for low, high in whole.tiles():
            tile = _Tile(whole, sink, low, high)
            grad_q[low:high] = tile.backward(grad[low:high], grad_kv, grad_sink, grad_entries)
        first = ctx.settings.window - 1
        grad_kv = grad_kv[first : first + kv.shape[0]].to(kv.dtype)
        if entries is not None and grad_entries is not None:
            grad_entries = grad_entries.to(entries.dtype)
        return grad_q[: q.shape[0]], grad_kv, grad_sink.to(sink.dtype), None, grad_entries, None, None


@dataclass(frozen=True)
class _Padded:
    """The inputs, widened to whole blocks; kv in fp32 with window - 1 rows before the first."""

    q: Tensor
    kv: Tensor
    start: Tensor
    entries: Tensor | None
    selected: Tensor | None
    settings: _Settings

    @classmethod
    def of(cls, q, kv, start, entries, selected, settings: _Settings) -> _Padded:
        tokens = q.shape[0]
        extra = -tokens % settings.block
        if extra:
            q = F.pad(q, (0, 0, 0, 0, 0, extra))
            start = F.pad(start, (0, extra), value=tokens + extra)
            selected = None if selected is None else F.pad(selected, (0, 0, 0, extra), value=-1)
        # One block more than needed at the end, so that shifted views of whole blocks stay inside.
        kv = F.pad(kv.float(), (0, 0, settings.window - 1, extra + settings.block))
        entries = None if entries is None else entries.float()
        return cls(q, kv, start, entries, selected, settings)

    def tiles(self) -> Iterator[tuple[int, int]]:
        tokens, heads, dim = self.q.shape
        chosen = 0 if self.selected is None else self.selected.shape[1]
        return self.settings.tiles(tokens, heads, dim, chosen)


class _Tile:
    """The probabilities of queries [low, high): Q = n blocks of c queries, W window keys a block."""

    def __init__(self, whole: _Padded, sink: Tensor, low: int, high: int) -> None:
        s = whole.settings
        self.settings, self.low = s, low
        self.q = whole.q[low:high].float()
        size, heads, dim = self.q.shape
        self.scale = dim**-0.5
        self.blocks = size // s.block
        self.rows = (self.blocks, s.block * heads, dim)
        stride = whole.kv.stride(0)
        # Overlapping read-only view: block i sees padded rows i*c ... i*c + W - 1.
        self.near = whole.kv[low:].as_strided(
            (self.blocks, s.span, dim), (s.block * stride, stride, 1)
        )
        near = _scaled_product(self.q.view(self.rows), self.near.mT, self.scale)
        near = near.view(size, heads, s.span).masked_fill_(
            self._blocked(whole.start[low:high])[:, None], -torch.inf
        )
        parts = [sink.float()[None, :, None].expand(size, heads, 1), near]
        self.index = self.far = None
        if whole.entries is not None and whole.selected is not None:
            chosen = whole.selected[low:high]
            self.index = chosen.clamp_min(0).flatten()
            self.far = whole.entries.index_select(0, self.index).view(*chosen.shape, dim)
            far = _scaled_product(self.q, self.far.mT, self.scale)
            parts.append(far.masked_fill_((chosen < 0)[:, None], -torch.inf))
        self.p = torch.softmax(torch.cat(parts, dim=-1), dim=-1)

    def weighted_sum(self) -> Tensor:
        """[Q, H, d] fp32."""
        near, far = self._split(self.p)
        return self._mixed(near, far, 1.0)

    def backward(
        self, grad: Tensor, grad_kv: Tensor, grad_sink: Tensor, grad_entries: Tensor | None
    ) -> Tensor:
        """The queries' gradient; adds to the other three."""
        s, size = self.settings, self.q.shape[0]
        grad = grad.float().contiguous()
        near = torch.bmm(grad.view(self.rows), self.near.mT).view(size, -1, s.span)
        parts = [grad.new_zeros(1, 1, 1).expand(size, near.shape[1], 1), near]
        if self.far is not None:
            parts.append(torch.bmm(grad, self.far.mT))
        by_score = torch._softmax_backward_data(torch.cat(parts, dim=-1), self.p, -1, torch.float32)
        grad_sink += by_score[..., 0].sum(0)

        p_near, p_far = self._split(self.p)
        d_near, d_far = self._split(by_score)
        both = _scaled_product(d_near.mT, self.q.view(self.rows), self.scale)
        both = torch.baddbmm(both, p_near.mT, grad.view(self.rows))
        self._add_to_window(grad_kv, both)
        if self.index is not None and p_far is not None and d_far is not None:
            assert grad_entries is not None
            both = _scaled_product(d_far.mT, self.q, self.scale)
            both = torch.baddbmm(both, p_far.mT, grad)
            # Absent entries point at row 0 with an exact zero.
            grad_entries.index_add_(0, self.index, both.flatten(0, 1))
        return self._mixed(d_near, d_far, self.scale)

    def _split(self, whole: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of [Q, H, 1 + W + K]: window part as [n, c*H, W], selected part as [Q, H, K]."""
        span = self.settings.span
        near = whole[..., 1 : 1 + span].view(self.blocks, self.rows[1], span)
        return near, None if self.far is None else whole[..., 1 + span :]

    def _mixed(self, near: Tensor, far: Tensor | None, scale: float) -> Tensor:
        out = _scaled_product(near, self.near, scale).view(self.q.shape)
        if far is None or self.far is None:
            return out
        return torch.baddbmm(out, far, self.far, alpha=scale)

    def _blocked(self, start: Tensor) -> Tensor:
        """[Q, W] bool: keys outside a query's window, or before its document."""
        s, device = self.settings, start.device
        key = torch.arange(s.span, device=device)
        query = torch.arange(s.block, device=device)[:, None]
        age = query + s.window - 1 - key  # query position minus key position
        outside = (age < 0) | (age >= s.window)
        block_start = self.low + s.block * torch.arange(self.blocks, device=device)
        first = start.view(self.blocks, s.block) - block_start[:, None] + s.window - 1
        return (outside | (key < first[:, :, None])).view(-1, s.span)

    def _add_to_window(self, grad_kv: Tensor, by_key: Tensor) -> None:
        """Add [n, W, d] block gradients to padded rows: two passes without overlap (W <= 2c)."""
        c, n, low = self.settings.block, self.blocks, self.low
        grad_kv[low : low + n * c].view(n, c, -1).add_(by_key[:, :c])
        rest = by_key[:, c:]
        shifted = grad_kv[low + c : low + c + n * c].view(n, c, -1)
        shifted[:, : rest.shape[1]].add_(rest)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a @ b for batches, without a pass of its own for the scale."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)
