"""One tile of attention: sliding window, selected entries and a sink, in one softmax.

Window keys are not gathered token by token: a block of c consecutive queries shares the
c + window - 1 keys before and inside it, a dense product under a band mask (at c = window / 2 two
of three keys are of use, at the speed of a matrix product). Products, softmax and sums are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

softmax_backward = torch.ops.aten._softmax_backward_data

SMALLEST_BLOCK = 16  # below this the dense products are too small to be fast


@dataclass(frozen=True)
class Keys:
    """What queries may look at.

    near [window - 1 + T + ..., d] fp32: window keys, padded in front for the first queries and by
    whole blocks at the end. start [T] int64: the first flat index a query may look at, t + 1 where
    it may look at nothing. entries [G, d] fp32, selected [T, K] int64 (-1 where absent), or None.
    """

    near: Tensor
    start: Tensor
    sink: Tensor
    entries: Tensor | None
    selected: Tensor | None
    window: int

    @classmethod
    def of(
        cls,
        kv: Tensor,
        start: Tensor,
        sink: Tensor,
        entries: Tensor | None,
        selected: Tensor | None,
        window: int,
    ) -> Keys:
        block = _block(window)
        # Room behind the last block, so that shifted views of whole blocks stay inside.
        near = F.pad(kv.float(), (0, 0, window - 1, -kv.shape[0] % block + window + block))
        entries = None if entries is None else entries.float()
        return cls(near, start, sink.float(), entries, selected, window)

    @property
    def block(self) -> int:
        """Queries that share one dense stretch of window keys."""
        return _block(self.window)

    @property
    def span(self) -> int:
        """Window keys that one block of queries can reach."""
        return self.block + self.window - 1

    def tiles(self, heads: int, workspace_bytes: int) -> Iterator[tuple[int, int]]:
        """Query ranges, whole blocks but the last, whose temporaries fit the workspace."""
        dim, tokens = self.near.shape[1], self.start.shape[0]
        chosen = 0 if self.selected is None else self.selected.shape[1]
        # Backward holds four score-shaped, six query-shaped and three entry-shaped tensors.
        scores = heads * (1 + self.span + chosen)
        per_token = 4 * (4 * scores + 6 * heads * dim + 3 * chosen * dim)
        step = max(1, workspace_bytes // (per_token * self.block)) * self.block
        return ((low, min(low + step, tokens)) for low in range(0, tokens, step))


@dataclass
class KeyGradients:
    """fp32 sums over all tiles, in a fixed order."""

    near: Tensor
    sink: Tensor
    entries: Tensor | None

    @classmethod
    def zeros(cls, keys: Keys) -> KeyGradients:
        entries = None if keys.entries is None else torch.zeros_like(keys.entries)
        return cls(torch.zeros_like(keys.near), torch.zeros_like(keys.sink), entries)


class Tile:
    """The probabilities p [Q, H, 1 + W + K] of queries [low, low + Q): sink, window, entries.

    q [Q, H, d] is widened to n whole blocks of c queries; what the extra ones give is cut off.
    """

    def __init__(self, keys: Keys, q: Tensor, low: int) -> None:
        self.keys, self.low, self.size = keys, low, q.shape[0]
        extra = -self.size % keys.block
        self.q = F.pad(q.float(), (0, 0, 0, 0, 0, extra)) if extra else q.float().contiguous()
        wide, heads, dim = self.q.shape
        self.scale = dim**-0.5
        self.blocks = wide // keys.block
        self.rows = (self.blocks, keys.block * heads, dim)
        stride = keys.near.stride(0)
        # Overlapping read-only view: block i sees padded rows i*c ... i*c + W - 1.
        self.near = keys.near[low:].as_strided(
            (self.blocks, keys.span, dim), (keys.block * stride, stride, 1)
        )
        high = low + self.size
        start = F.pad(keys.start[low:high], (0, extra), value=high + extra)
        near = _product(self.q.view(self.rows), self.near.mT, self.scale)
        near = near.view(wide, heads, keys.span)
        near.masked_fill_(self._blocked(start)[:, None], -torch.inf)
        parts = [keys.sink[None, :, None].expand(wide, heads, 1), near]
        self.index = self.far = None
        if keys.entries is not None and keys.selected is not None:
            chosen = F.pad(keys.selected[low:high], (0, 0, 0, extra), value=-1)
            self.index = chosen.clamp_min(0).flatten()
            self.far = keys.entries.index_select(0, self.index).view(*chosen.shape, dim)
            far = _product(self.q, self.far.mT, self.scale)
            parts.append(far.masked_fill_((chosen < 0)[:, None], -torch.inf))
        self.p = torch.softmax(torch.cat(parts, dim=-1), dim=-1)

    def output(self) -> Tensor:
        """The weighted sum of values, [Q, H, d] fp32; 0 for a query that sees nothing."""
        near, far = self._split(self.p)
        return self._mixed(near, far, 1.0)[: self.size]

    def backward(self, grad: Tensor, into: KeyGradients) -> Tensor:
        """The queries' gradient [Q, H, d] fp32 for that of the output; adds the keys' to `into`."""
        wide, keys = self.q.shape[0], self.keys
        grad = F.pad(grad.float(), (0, 0, 0, 0, 0, wide - self.size)).contiguous()
        near = torch.bmm(grad.view(self.rows), self.near.mT).view(wide, -1, keys.span)
        parts = [grad.new_zeros(1, 1, 1).expand(wide, near.shape[1], 1), near]
        if self.far is not None:
            parts.append(torch.bmm(grad, self.far.mT))
        by_score = softmax_backward(torch.cat(parts, dim=-1), self.p, -1, torch.float32)
        into.sink += by_score[..., 0].sum(0)

        p_near, p_far = self._split(self.p)
        d_near, d_far = self._split(by_score)
        both = _product(d_near.mT, self.q.view(self.rows), self.scale)
        both.baddbmm_(p_near.mT, grad.view(self.rows))
        self._add_to_window(into.near, both)
        if self.index is not None and p_far is not None and d_far is not None:
            assert into.entries is not None
            both = _product(d_far.mT, self.q, self.scale)
            both.baddbmm_(p_far.mT, grad)
            # Absent entries point at row 0 with an exact zero.
            into.entries.index_add_(0, self.index, both.flatten(0, 1))
        return self._mixed(d_near, d_far, self.scale)[: self.size]

    def _split(self, whole: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of [Q, H, 1 + W + K]: window part as [n, c*H, W], selected part as [Q, H, K]."""
        span = self.keys.span
        near = whole[..., 1 : 1 + span].view(self.blocks, self.rows[1], span)
        return near, None if self.far is None else whole[..., 1 + span :]

    def _mixed(self, near: Tensor, far: Tensor | None, scale: float) -> Tensor:
        out = _product(near, self.near, scale).view(self.q.shape)
        if far is not None and self.far is not None:
            out.baddbmm_(far, self.far, alpha=scale)
        return out

    def _blocked(self, start: Tensor) -> Tensor:
        """[Q, W] bool: keys outside a query's window, or before its document."""
        window, span, block = self.keys.window, self.keys.span, self.keys.block
        key = torch.arange(span, device=start.device)
        query = torch.arange(block, device=start.device)[:, None]
        age = query + window - 1 - key  # query position minus key position
        outside = (age < 0) | (age >= window)
        first_query = self.low + block * torch.arange(self.blocks, device=start.device)
        first_key = start.view(self.blocks, block) - first_query[:, None] + window - 1
        return (outside | (key < first_key[:, :, None])).view(-1, span)

    def _add_to_window(self, total: Tensor, by_key: Tensor) -> None:
        """Add [n, W, d] block gradients to padded rows, c keys of every block at a time: within
        such a pass no two blocks reach the same row."""
        c, n = self.keys.block, self.blocks
        for first in range(0, self.keys.span, c):
            part, at = by_key[:, first : first + c], self.low + first
            total[at : at + n * c].view(n, c, -1)[:, : part.shape[1]].add_(part)


def _block(window: int) -> int:
    return max(window // 2, SMALLEST_BLOCK)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a @ b for batches, without a pass of its own for the scale."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)
