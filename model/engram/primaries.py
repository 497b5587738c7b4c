"""The rows of the Engram tables that a rank masters, and the gradients that reach them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
