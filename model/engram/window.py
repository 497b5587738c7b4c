"""A window: the rows of several micro-batches, fetched together, and the figures of fetching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from model.engram.rows import EngramRows


@dataclass(frozen=True)
class Window:
    """The distinct rows of several micro-batches, by Engram layer, and their gradient."""

    ids: list[Tensor]  # per layer [U] int64, ascending
    # Per layer, what its inverses point into. Where tables are divided over ranks the layers share
    # one tensor, ordered by owner; else row i is that of ids[i].
    values: list[Tensor]
    inverses: list[list[Tensor]]  # per micro-batch and layer [B, S, columns] int64
    # As values, fp32, summed over the window's micro-batches; empty for frozen tables.
    grads: list[Tensor]

    def rows(self, micro_batch: int) -> list[EngramRows]:
        """One EngramRows a layer for this micro-batch; all share the window's gradient buffers."""
        grads = self.grads or [None] * len(self.ids)
        parts = zip(self.values, self.inverses[micro_batch], grads, strict=True)
        return [EngramRows(value, inverse, grad) for value, inverse, grad in parts]

    def micro_batches(self) -> Iterator[list[EngramRows]]:
        """`rows` of each in turn."""
        return (self.rows(number) for number in range(len(self.inverses)))


@dataclass
class Figures:
    """What a rank's look-ups have cost.

    reads, distinct: rows that positions read, and rows fetched for them. lookup_bytes: ids, rows
    and gradients, and replica_bytes: changed rows for the copies, that this rank sent to others.
    waited: seconds in which nothing else was done.
    """

    reads: int = 0
    distinct: int = 0
    lookup_bytes: int = 0
    replica_bytes: int = 0
    waited: float = 0.0
