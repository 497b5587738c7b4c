"""The columns left of a rank's own, which its first queries' windows reach into."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.parallel.columns import Columns


def halo(x: Tensor, columns: Columns, *, width: int, known: Tensor | None = None) -> Tensor:
    """[stretches, width, d]: what the ranks to the left have in the `width` columns before ours.

    x [stretches * n, d] is this rank's own. Columns before a row's first are 0. A halo wider than n
    comes from several ranks. Their part of the gradient is sent back, and theirs arrives here,
    summed up in fp32. `known`: this result, from a first run; then nothing is sent in forward.
    Every rank of the group makes the same calls, forward and backward, in the same order.
    """
    return _Halo.apply(x, columns, width, known)  # pyright: ignore


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, columns, width, known):  # type: ignore[override]
        ctx.columns, ctx.shape, ctx.dtype = columns, x.shape, x.dtype
        if known is not None:
            return known
        rows = x.unflatten(0, (columns.stretches, -1))
        plan = _Plan.of(columns, rows.shape[1], width)
        found = plan.exchange([rows[:, rows.shape[1] - n :] for n in plan.send], plan.receive)
        halo = torch.cat(found, dim=1)
        return F.pad(halo, (0, 0, width - halo.shape[1], 0))

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        columns, width = ctx.columns, grad.shape[1]
        n = ctx.shape[0] // columns.stretches
        plan = _Plan.of(columns, n, width)
        parts = grad[:, width - sum(plan.receive) :].split(plan.receive, dim=1)
        total = grad.new_zeros(columns.stretches, n, grad.shape[2], dtype=torch.float32)
        for part in plan.exchange(list(parts), plan.send):
            total[:, n - part.shape[1] :] += part
        return total.flatten(0, 1).to(ctx.dtype), None, None, None


class _Plan:
    """How many of its last columns this rank sends each rank, and what it receives from each."""

    def __init__(self, columns: Columns, send: list[int], receive: list[int]) -> None:
        self.columns, self.send, self.receive = columns, send, receive

    @classmethod
    def of(cls, columns: Columns, n: int, width: int) -> _Plan:
        ranks, me = range(columns.group.size), columns.group.rank

        def reach(distance: int) -> int:
            """Of a rank's n columns, those that the rank `distance` to its right looks at."""
            return min(n, max(0, width - (distance - 1) * n)) if distance > 0 else 0

        return cls(columns, [reach(r - me) for r in ranks], [reach(me - r) for r in ranks])

    def exchange(self, parts: list[Tensor], expected: list[int]) -> list[Tensor]:
        """parts[r] [stretches, sent, d] to rank r; from each [stretches, expected, d]."""
        rows = self.columns.stretches
        sizes = [rows * part.shape[1] for part in parts]
        wanted = [rows * n for n in expected]
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        got = self.columns.group.all_to_all_rows(flat, send=sizes, receive=wanted).split(wanted)
        return [g.view(rows, n, *g.shape[1:]) for g, n in zip(got, expected, strict=True)]
