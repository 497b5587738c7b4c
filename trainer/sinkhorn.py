"""Sinkhorn-balanced momentum: updates whose rows and columns all have the same size.

For tables of vectors (Engram tables, embedding, head), most rows of which see few gradients. With
M the momentum and G the gradient [rows, n]:

    M = 0.95 M + 0.05 G;  N = 0.95 M + 0.05 G;  rows of N not above 1e-3 of the mean row norm are
    left out;  eleven times, rows first and last: divide N's rows, then columns, by their norms;
    W -= 0.18 lr sqrt(n) N.

N and its balanced form never exist whole: two vectors of scales say what they are, and passes go
over tiles of rows. Norms are of the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

MOMENTUM = 0.95
SCALE = 0.18
ROUNDS = 11
LEAST_ROW = 1e-3  # of the mean row norm
TINY = 1e-20
TILE_VALUES = 1 << 22  # of a tile's temporaries: 16 MB each in fp32


def sinkhorn_step(
    weight: Tensor, momentum: Tensor, grad: Tensor, *, lr: float, ids: Tensor | None = None
) -> None:
    """One step in place on weight [rows, n], with fp32 `momentum` of its shape.

    grad [rows, n]; with `ids` [U] int64, ascending and distinct, grad [U, n] holds those rows and
    all others are zero.
    """
    momentum.mul_(MOMENTUM)
    if ids is None:
        momentum.add_(grad, alpha=1 - MOMENTUM)
    else:
        momentum.index_add_(0, ids, grad.to(momentum.dtype), alpha=1 - MOMENTUM)
    update = _Update(momentum, grad, ids)
    row, column = _balanced(update)
    size = SCALE * lr * weight.shape[1] ** 0.5
    for low, tile in update.tiles():
        high = low + len(tile)
        tile.mul_(row[low:high, None]).mul_(column)
        weight[low:high].sub_(tile.to(weight.dtype), alpha=size)


class _Update:
    """N, made tile by tile."""

    def __init__(self, momentum: Tensor, grad: Tensor, ids: Tensor | None) -> None:
        self.momentum, self.grad, self.ids = momentum, grad, ids
        rows, columns = momentum.shape
        self.step = max(1, TILE_VALUES // columns)
        self.edges = list(range(0, rows, self.step))
        bounds = torch.tensor([*self.edges, rows], device=momentum.device)
        self.parts = [] if ids is None else torch.searchsorted(ids, bounds).tolist()

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """(first row, N [up to `step`, n], which is the caller's to change)."""
        for number, low in enumerate(self.edges):
            tile = self.momentum[low : low + self.step] * MOMENTUM
            if self.ids is None:
                tile.add_(self.grad[low : low + self.step], alpha=1 - MOMENTUM)
            else:
                own = slice(self.parts[number], self.parts[number + 1])
                part = self.grad[own].to(tile.dtype)
                tile.index_add_(0, self.ids[own] - low, part, alpha=1 - MOMENTUM)
            yield low, tile


def _balanced(update: _Update) -> tuple[Tensor, Tensor]:
    """Scales of rows [rows] and of columns [n], so that row_i * N_ij * column_j is balanced."""
    rows, columns = update.momentum.shape
    row = update.momentum.new_empty(rows)
    for low, tile in update.tiles():
        torch.linalg.vector_norm(tile, dim=1, out=row[low : low + len(tile)])
    row = (row > LEAST_ROW * row.double().mean()).to(row.dtype)
    column = torch.ones_like(row[:1]).expand(columns).clone()
    for number in range(ROUNDS):
        squares = torch.zeros(columns, dtype=torch.float64, device=row.device)
        for low, tile in update.tiles():
            own = row[low : low + len(tile)]
            tile.mul_(own[:, None]).mul_(column)
            if number % 2 == 0:
                own.div_(_divisor(torch.linalg.vector_norm(tile, dim=1)))
            else:
                squares += tile.square().sum(0, dtype=torch.float64)
        if number % 2:
            column.div_(_divisor(squares.sqrt().to(column.dtype)))
    return row, column


def _divisor(norm: Tensor) -> Tensor:
    """norm + 1e-20; 1 for a row or column of zeros, whose scale would grow without end."""
    return torch.where(norm > 0, norm + TINY, 1.0)
