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

SMALLEST_BLOCK = 16  # below this the dense products are too small to be fast


@dataclass(frozen=True)
class Keys:
    """What queries may look at.

    near [window - 1 + T + ..., d] fp32: window keys, those before the first query's own in front
    (padding where there are none), and whole blocks of padding at the end. start [T] int64: the
    first index a query may look at, counted from the first query's own, t + 1 where it may look at
    nothing. entries [G, d] fp32, selected [T, K] int64 (-1 where absent), or None.
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
        block, tokens = _block(window), start.shape[0]
        before = window - 1 - (kv.shape[0] - tokens)
        # Room behind the last block, so that shifted views of whole blocks stay inside.
        near = F.pad(kv.float(), (0, 0, before, -tokens % block + window + block))
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
        # Backward holds three score-shaped, six query-shaped and two entry-shaped tensors.
        scores = heads * (self.span + chosen)
        per_token = 4 * (3 * scores + 6 * heads * dim + 2 * chosen * dim)
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
    """The attention weights of queries [low, low + Q) over window keys and selected entries.

    q [Q, H, d] is widened to n whole blocks of c queries; what the extra ones give is cut off.
    Weights are exp(score - shift): `near` [Q, H, W] and `far` [Q, H, K] or None. Without log_sum
    the shift is the largest score, and `log_sum` [Q, H, 1] is made: the log of all a query's
    exponentials, the sink's among them. With it, the shift is log_sum and the weights are the
    probabilities.
    """

    def __init__(self, keys: Keys, q: Tensor, low: int, log_sum: Tensor | None = None) -> None:
        self.keys, self.low, self.size = keys, low, q.shape[0]
        self.q = _widened(q.float(), keys.block)
        wide, heads, dim = self.q.shape
        self.scale = dim**-0.5
        self.blocks = wide // keys.block
        self.rows = (self.blocks, keys.block * heads, dim)
        stride = keys.near.stride(0)
        # Overlapping read-only view: block i sees padded rows i*c ... i*c + W - 1.
        self.near_keys = keys.near[low:].as_strided(
            (self.blocks, keys.span, dim), (keys.block * stride, stride, 1)
        )
        near = _product(self.q.view(self.rows), self.near_keys.mT, self.scale)
        self.near = near.view(wide, heads, keys.span).add_(self._hidden()[:, None])
        self.far = self.far_keys = self.index = None
        if keys.entries is not None and keys.selected is not None:
            chosen = _widened(keys.selected[low : low + self.size], keys.block, fill=-1)
            self.index = chosen.clamp_min(0).flatten()
            self.far_keys = keys.entries.index_select(0, self.index).view(*chosen.shape, dim)
            hidden = torch.where(chosen < 0, -torch.inf, 0.0)
            self.far = _product(self.q, self.far_keys.mT, self.scale).add_(hidden[:, None])
        self.sum = None
        if log_sum is None:
            self.log_sum = self._normalise()
        else:
            self.log_sum = _widened(log_sum, keys.block)
            self._exponentiate(self.log_sum)

    def _normalise(self) -> Tensor:
        shift = torch.maximum(self.near.amax(-1, keepdim=True), self.keys.sink[:, None])
        if self.far is not None:
            shift = torch.maximum(shift, self.far.amax(-1, keepdim=True))
        self._exponentiate(shift)
        self.sum = (self.keys.sink[:, None] - shift).exp_().add_(self.near.sum(-1, keepdim=True))
        if self.far is not None:
            self.sum += self.far.sum(-1, keepdim=True)
        return shift.add_(self.sum.log())

    def _exponentiate(self, shift: Tensor) -> None:
        for weights in (self.near, self.far):
            if weights is not None:
                weights.sub_(shift).exp_()

    def settle(self) -> None:
        """Turn the weights into probabilities, for backward."""
        if self.sum is not None:
            self.near.div_(self.sum)
            if self.far is not None:
                self.far.div_(self.sum)
            self.sum = None

    def output(self) -> Tensor:
        """The weighted mean of values, [Q, H, d] fp32; 0 for a query that sees nothing."""
        out = self._mixed(self.near, self.far, 1.0)
        return (out if self.sum is None else out.div_(self.sum))[: self.size]

    def mass(self) -> Tensor:
        """What all heads together give each selected entry, [Q, K] fp32; 0 where absent."""
        assert self.far is not None and self.sum is not None
        return torch.bmm(self.sum.reciprocal().mT, self.far)[: self.size, 0]

    def backward(self, grad: Tensor, output: Tensor, into: KeyGradients) -> Tensor:
        """The queries' gradient [Q, H, d] fp32 for that of `output`; adds the keys' to `into`.

        The weights must be probabilities: those of a tile made with its log_sum, or settled."""
        keys = self.keys
        assert self.sum is None
        mean = _widened((grad * output).sum(-1, keepdim=True), keys.block)
        sink = (keys.sink[:, None] - self.log_sum).exp_()
        into.sink -= (sink * mean)[..., 0].sum(0)
        grad = _widened(grad, keys.block)
        by_near = torch.bmm(grad.view(self.rows), self.near_keys.mT).view(self.near.shape)
        by_near = by_near.sub_(mean).mul_(self.near)
        both = _product(self._by_block(by_near).mT, self.q.view(self.rows), self.scale)
        both.baddbmm_(self._by_block(self.near).mT, grad.view(self.rows))
        self._add_to_window(into.near, both)
        by_far = None
        if self.far is not None and self.far_keys is not None and self.index is not None:
            assert into.entries is not None
            by_far = torch.bmm(grad, self.far_keys.mT).sub_(mean).mul_(self.far)
            both = _product(by_far.mT, self.q, self.scale)
            both.baddbmm_(self.far.mT, grad)
            # Absent entries point at row 0 with an exact zero.
            into.entries.index_add_(0, self.index, both.flatten(0, 1))
        return self._mixed(by_near, by_far, self.scale)[: self.size]

    def _by_block(self, near: Tensor) -> Tensor:
        """[Q, H, W] -> [n, c*H, W], a view."""
        return near.view(self.blocks, -1, self.keys.span)

    def _mixed(self, near: Tensor, far: Tensor | None, scale: float) -> Tensor:
        out = _product(self._by_block(near), self.near_keys, scale).view(self.q.shape)
        if far is not None and self.far_keys is not None:
            out.baddbmm_(far, self.far_keys, alpha=scale)
        return out

    def _hidden(self) -> Tensor:
        """[Q, W] fp32 to add to scores: -inf for keys outside a query's window, or before its
        document; else 0."""
        window, span, block = self.keys.window, self.keys.span, self.keys.block
        start = self.keys.start[self.low : self.low + self.size]
        start = _widened(start, block, fill=self.low + self.blocks * block)
        key = torch.arange(span, device=start.device)
        query = torch.arange(block, device=start.device)[:, None]
        age = query + window - 1 - key  # query position minus key position
        band = torch.where((age < 0) | (age >= window), -torch.inf, 0.0)
        first_query = self.low + block * torch.arange(self.blocks, device=start.device)
        first_key = start.view(self.blocks, block) - first_query[:, None] + window - 1
        return torch.where(key < first_key[:, :, None], -torch.inf, band).view(-1, span)

    def _add_to_window(self, total: Tensor, by_key: Tensor) -> None:
        """Add [n, W, d] block gradients to padded rows, c keys of every block at a time: within
        such a pass no two blocks reach the same row."""
        c, n = self.keys.block, self.blocks
        for first in range(0, self.keys.span, c):
            part, at = by_key[:, first : first + c], self.low + first
            total[at : at + n * c].view(n, c, -1)[:, : part.shape[1]].add_(part)


def _widened(x: Tensor, block: int, *, fill: float = 0) -> Tensor:
    """x [Q, ...] with `fill` behind it, up to whole blocks."""
    extra = -x.shape[0] % block
    if not extra:
        return x.contiguous()
    return torch.cat([x, x.new_full((extra, *x.shape[1:]), fill)])


def _block(window: int) -> int:
    return max(window // 2, SMALLEST_BLOCK)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a @ b for batches, without a pass of its own for the scale."""
    return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=scale)
