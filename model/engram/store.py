"""Where the Engram tables live, and the windows through which a step reads and corrects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from model.engram.rows import EngramRows


@dataclass(frozen=True)
class Window:
    """The distinct rows of several micro-batches, by Engram layer, and their gradient."""

    ids: list[Tensor]  # per layer [U] int64, ascending
    values: list[Tensor]  # per layer [U, head_dim]
    inverses: list[list[Tensor]]  # per micro-batch and layer [B, S, columns] int64
    # Per layer [U, head_dim] fp32, summed over the window's micro-batches; empty for frozen tables.
    grads: list[Tensor]

    def rows(self, micro_batch: int) -> list[EngramRows]:
        """One EngramRows a layer for this micro-batch; all share the window's gradient buffers."""
        grads = self.grads or [None] * len(self.ids)
        parts = zip(self.values, self.inverses[micro_batch], grads, strict=True)
        return [EngramRows(value, inverse, grad) for value, inverse, grad in parts]


class RowStore(Protocol):
    """The tables of a model's Engram layers, whatever they are made of.

    layers: the Engram layers of this model. rows: how many rows each one's table has.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]

    def open_window(self, rows: list[Tensor]) -> Window:
        """Fetch the distinct rows of some micro-batches, each [B, S, Engram layers, columns] int64.

        ValueError names a row id outside its table: a wrong id would read another row in silence.
        """
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What tells these tables from others, as plain data: sizes, and a hash of some rows."""
        ...

    def close(self) -> None:
        """Release files and threads."""
        ...


def distinct_rows(
    rows: Sequence[Tensor], *, layers: Sequence[int], counts: Sequence[int]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The `ids` and `inverses` of a Window over these micro-batches; ValueError as open_window."""
    every_id: list[Tensor] = []
    inverses: list[list[Tensor]] = [[] for _ in rows]
    for index, (layer, count) in enumerate(zip(layers, counts, strict=True)):
        parts = [batch[:, :, index] for batch in rows]
        every = torch.cat([part.flatten() for part in parts])
        ids, inverse = torch.unique(every, return_inverse=True)
        if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= count):
            raise ValueError(
                f"Engram row ids of layer {layer} reach from {int(ids[0])} to {int(ids[-1])}, "
                f"outside its {count} rows: the batch was hashed for another geometry"
            )
        every_id.append(ids)
        sizes = [part.numel() for part in parts]
        for found, part, own in zip(inverses, parts, inverse.split(sizes), strict=True):
            found.append(own.view(part.shape))
    return every_id, inverses
