"""Products of token rows with the weights of their experts.

bfloat16 on a GPU goes through torch's grouped product, one kernel for all experts. Everything else
takes a product for each expert: on a CPU that is as fast, and how many rows of other documents
stand beside a row does not change its bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Matrix libraries take other kernels for very few rows, with other roundings: a token's bits would
# depend on how many tokens of other documents share its expert.
FEWEST_ROWS = 16


class Span(NamedTuple):
    """Rows start..stop, sorted by expert, of the consecutive experts first, first + 1, ..."""

    first: int
    sizes: list[int]  # rows of each
    start: int
    stop: int

    @property
    def experts(self) -> slice:
        return slice(self.first, self.first + len(self.sizes))

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def spans(first: int, sizes: list[int], *, most: int) -> Iterator[Span]:
    """The experts from `first` on, as many at a time as have `most` rows together, at least one."""
    at = start = 0
    while at < len(sizes):
        end, total = at + 1, sizes[at]
        while end < len(sizes) and total + sizes[end] <= most:
            total += sizes[end]
            end += 1
        yield Span(first + at, sizes[at:end], start, start + total)
        at, start = end, start + total


def by_expert(rows: Tensor, weight: Tensor, span: Span) -> Tensor:
    """rows [n, a], each times its expert's weight[e] (weight [E, a, b]) -> [n, b]."""
    if has_grouped(rows) and len(rows):
        return F.grouped_mm(rows, weight[span.experts], offs=_ends(span, rows))
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    parts = rows.split(span.sizes), out.split(span.sizes), weight[span.experts].unbind()
    for size, part, result, own in zip(span.sizes, *parts, strict=True):
        if 0 < size < FEWEST_ROWS:
            result.copy_((F.pad(part, (0, 0, 0, FEWEST_ROWS - size)) @ own)[:size])
        else:
            torch.mm(part, own, out=result)
    return out


def put_outer(total: Tensor, left: Tensor, right: Tensor, span: Span) -> None:
    """Write left^T @ right of each expert's rows to total[e] (left [n, a], right [n, b], total
    [E, a, b]); an expert without any gets zeros."""
    if has_grouped(left) and len(left):
        total[span.experts] = F.grouped_mm(left.t(), right, offs=_ends(span, left))
        for e, size in enumerate(span.sizes, start=span.first):
            if size == 0:  # the kernel leaves it unwritten on some devices
                total[e].zero_()
        return
    parts = left.t().split(span.sizes, 1), right.split(span.sizes), total[span.experts].unbind()
    for one, other, own in zip(*parts, strict=True):
        torch.mm(one, other, out=own)


def has_grouped(rows: Tensor) -> bool:
    """Whether torch has a grouped product for such rows: a matter of device and type alone."""
    return rows.device.type == "cuda" and rows.dtype == torch.bfloat16


def _ends(span: Span, rows: Tensor) -> Tensor:
    ends = torch.tensor(list(accumulate(span.sizes)), dtype=torch.int32)
    return ends.to(rows.device, non_blocking=True)
