"""The rows of the Engram tables that a rank masters, and the gradients that reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engram.exchange import Exchange, Pending
from model.engram.plan import StepPlan


@dataclass(frozen=True)
class PrimaryTable:
    """Rows [low, low + n) of one Engram layer's table: those that this rank masters.

    Every row of a table has one such rank in the world, where its fp32 value and its optimiser
    state live. weight: fp32 [n, head_dim], a view of the table; n may be 0.
    """

    layer: int
    low: int
    weight: Tensor


@dataclass(frozen=True)
class TableGradients:
    """The gradients of a step for the rows that this rank masters, summed over all ranks.

    By Engram layer: ids [U] int64, distinct, ascending, relative to PrimaryTable.low; grads fp32
    [U, head_dim]. Each row appears on one rank of the world. Frozen tables have none.
    """

    ids: list[Tensor]
    grads: list[Tensor]


class GradientSums:
    """Adds up what all ranks send for this rank's primary rows while a step's windows go by.

    Window after window, in each the ranks in order, so the sum does not depend on what arrives
    first. Besides it there is the memory of one window on its way.
    """

    def __init__(self, plan: StepPlan, *, exchange: Exchange, device: torch.device) -> None:
        """device: where the sums are wanted, beside the tables."""
        self._plan, self._exchange, self._device = plan, exchange, device
        # With nothing to add up, a window's buffer is its sum.
        self._alone = exchange.size == 1 and len(plan.windows) == 1
        self._rows, self._places = plan.windows[0].at_primary, []
        if not self._alone:
            given = [plan.given.of(window) for window in range(len(plan.windows))]
            every = [ids for by_rank in given for ids in by_rank.values()]
            self._rows, places = torch.unique(torch.cat(every), return_inverse=True)
            cut = iter(places.split([len(ids) for ids in every]))
            self._places = [{rank: next(cut) for rank in by_rank} for by_rank in given]
        self._sum: Tensor | None = None
        self._under_way: tuple[Pending, int, dict[int, Tensor]] | None = None

    def begin(self, window: int, buffer: Tensor) -> None:
        """Send a window's gradients [U, head_dim] to where their rows are mastered."""
        self.settle()
        if self._alone:
            self._sum = buffer.to(self._device)
            return
        mine = self._plan.by_primary(window, buffer)
        own = mine.pop(self._exchange.rank)
        arriving = {
            rank: own if rank == self._exchange.rank else own.new_empty(len(place), own.shape[1])
            for rank, place in self._places[window].items()
        }
        others = {rank: rows for rank, rows in arriving.items() if rank != self._exchange.rank}
        self._under_way = self._exchange.begin(mine, others), window, arriving

    def settle(self) -> None:
        """Wait for the window under way and add what has come."""
        if self._under_way is None:
            return
        pending, window, arrived = self._under_way
        pending.wait()
        if self._sum is None:
            dim = arrived[self._exchange.rank].shape[1]
            self._sum = torch.zeros(len(self._rows), dim, device=self._device)
        for rank, rows in arrived.items():
            place = self._places[window][rank].to(self._device)
            self._sum.index_add_(0, place, rows.to(self._device))
        self._under_way = None

    def collect(self, layer_rows: Sequence[int]) -> TableGradients:
        """The sums of all windows; layer_rows: how many rows of each layer this rank masters."""
        self.settle()
        assert self._sum is not None
        out, low = TableGradients([], []), 0
        for count in layer_rows:
            first, end = torch.searchsorted(self._rows, torch.tensor([low, low + count])).tolist()
            out.ids.append((self._rows[first:end].long() - low).to(self._device))
            out.grads.append(self._sum[first:end])
            low += count
        return out
