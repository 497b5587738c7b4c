"""How matrices of which every rank holds some rows come together whole, and go back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model.parallel.group import Group


class Exchange:
    """Matrices of one shape over the ranks of a group: matrix j to rank (start + j) mod n.

    Each rank sends and receives every row of every matrix once on either way, in one all-to-all:
    nobody holds more than its share of whole matrices.
    """

    def __init__(
        self, held: Sequence[Sequence[int]], group: Group, *, start: int, device: torch.device
    ) -> None:
        """held [matrices][ranks]: how many rows of a matrix a rank has, in the ranks' order."""
        self._group = group
        heights = torch.tensor(held, dtype=torch.int64)
        place = (torch.arange(len(heights)) + start) % group.size
        mine = heights[:, group.rank]
        # My rows, matrix by matrix, in the order of where they go.
        self._order = torch.argsort(place.repeat_interleave(mine), stable=True).to(device)
        self._sent = torch.zeros(group.size, dtype=torch.int64).index_add_(0, place, mine).tolist()
        # What arrives comes by sender, then by matrix; stable sorting leaves a matrix's rows in the
        # senders' order, which is that of its rows.
        own = heights[place == group.rank]
        self._received = own.sum(0).tolist()
        matrix = torch.arange(len(own)).repeat(group.size)
        matrix = matrix.repeat_interleave(own.t().flatten())
        self._assembly = torch.argsort(matrix, stable=True).to(device)

    def gather(self, rows: Tensor) -> Tensor:
        """From this rank's rows of all matrices to all rows of its own matrices, in order."""
        leaving = rows.index_select(0, self._order)
        arrived = self._group.all_to_all_rows(leaving, send=self._sent, receive=self._received)
        return arrived.index_select(0, self._assembly)

    def scatter(self, rows: Tensor) -> Tensor:
        """The way back."""
        leaving = torch.empty_like(rows).index_copy_(0, self._assembly, rows)
        arrived = self._group.all_to_all_rows(leaving, send=self._received, receive=self._sent)
        return torch.empty_like(arrived).index_copy_(0, self._order, arrived)
