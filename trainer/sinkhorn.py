"""Sinkhorn-balanced momentum: updates whose rows and columns all have the same size.

For tables of vectors (Engram tables, embedding, head), most rows of which see few gradients. With
M the momentum and G the gradient [rows, n]:

    M = 0.95 M + 0.05 G;  N = 0.95 M + 0.05 G;  rows of N not above 1e-3 of the mean row norm are
    left out;  eleven times, rows first and last: divide N's rows, then columns, by their norms;
    W -= 0.18 lr sqrt(n) N.

N and its balanced form never exist whole: two vectors of scales say what they are, and seven passes
go over tiles of rows. Where several ranks divide the rows, the mean row norm and the column norms
are those of the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from model.parallel.group import Group
from trainer.momentum import MomentumRule
from trainer.shards import local_part, shard_group

MOMENTUM = 0.95
SCALE = 0.18
ROUNDS = 11
LEAST_ROW = 1e-3  # of the mean row norm
TINY = 1e-20
TILE_VALUES = 1 << 22  # of a tile's temporaries: 16 MB each in fp32


class Sinkhorn(MomentumRule):
    """The rule over matrices, whole on this rank or DTensors divided along their rows."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], *, lr: float) -> None:
        super().__init__("sinkhorn", named, lr=lr)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, in place; the same ones on all ranks."""
        for tensor in self.group["params"]:
            if tensor.grad is not None:
                sinkhorn_step(
                    local_part(tensor),
                    local_part(self.state[tensor]["momentum"]),
                    local_part(tensor.grad),
                    lr=self.group["lr"],
                    group=shard_group(tensor, dim=0),
                )


def sinkhorn_step(
    weight: Tensor,
    momentum: Tensor,
    grad: Tensor,
    *,
    lr: float,
    ids: Tensor | None = None,
    group: Group | None = None,
) -> None:
    """One step in place on weight [rows, n], with fp32 `momentum` of its shape.

    grad [rows, n]; with `ids` [U] int64, ascending and distinct, grad [U, n] holds those rows and
    all others are zero. group: the ranks that divide the table's rows, all of which take the step.
    """
    momentum.mul_(MOMENTUM)
    if ids is None:
        momentum.add_(grad, alpha=1 - MOMENTUM)
    else:
        momentum.index_add_(0, ids, grad.to(momentum.dtype), alpha=1 - MOMENTUM)
    _balance(weight, _Update(momentum, grad, ids), lr=lr, group=group or Group())


class _Update:
    """N, made tile by tile."""

    def __init__(self, momentum: Tensor, grad: Tensor, ids: Tensor | None) -> None:
        self.momentum, self.grad, self.ids = momentum, grad, ids
        rows, columns = momentum.shape
        self.step = max(1, TILE_VALUES // columns)
        self.edges = list(range(0, rows, self.step))
        bounds = torch.tensor([*self.edges, rows], device=momentum.device)
        self.parts = [] if ids is None else torch.searchsorted(ids, bounds).tolist()

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """(its rows, N [up to `step`, n], which is the caller's to change)."""
        for number, low in enumerate(self.edges):
            tile = self.momentum[low : low + self.step] * MOMENTUM
            if self.ids is None:
                tile.add_(self.grad[low : low + self.step], alpha=1 - MOMENTUM)
            else:
                own = slice(self.parts[number], self.parts[number + 1])
                part = self.grad[own].to(tile.dtype)
                tile.index_add_(0, self.ids[own] - low, part, alpha=1 - MOMENTUM)
            yield slice(low, low + len(tile)), tile


def _balance(weight: Tensor, update: _Update, *, lr: float, group: Group) -> None:
    """Take N, balanced, from the weight.

    row_i * N_ij * column_j is what it is after each round; a pass over the tiles ends one round
    of the rows and gathers what the next one of the columns needs.
    """
    rows, columns = weight.shape
    row = update.momentum.new_empty(rows)
    column = update.momentum.new_ones(columns)
    for here, tile in update.tiles():
        torch.linalg.vector_norm(tile, dim=1, out=row[here])
    mean = _mean(row, group)
    row = torch.where(row > LEAST_ROW * mean, _divisor(row).reciprocal_(), 0.0)
    for number in range(ROUNDS // 2):
        squares = torch.zeros(columns, dtype=torch.float64, device=row.device)
        for here, tile in update.tiles():
            tile.mul_(row[here, None]).mul_(column)
            if number > 0:
                _normalise(tile, row[here])
            squares += tile.square_().sum(0, dtype=torch.float64)
        group.all_reduce_sum(squares)
        column.div_(_divisor(squares.sqrt_().to(column.dtype)))
    size = SCALE * lr * columns**0.5
    for here, tile in update.tiles():
        tile.mul_(row[here, None]).mul_(column)
        _normalise(tile, row[here])
        weight[here].sub_(tile.to(weight.dtype), alpha=size)


def _normalise(tile: Tensor, scale: Tensor) -> None:
    """Divide the rows of a tile, and what they are scaled by, by their norms."""
    divisor = _divisor(torch.linalg.vector_norm(tile, dim=1))
    tile.div_(divisor[:, None])
    scale.div_(divisor)


def _mean(values: Tensor, group: Group) -> Tensor:
    """Over all ranks, fp64."""
    total = torch.stack([values.sum(dtype=torch.float64), values.new_tensor(len(values)).double()])
    total = group.all_reduce_sum(total)
    return total[0] / total[1]


def _divisor(norm: Tensor) -> Tensor:
    """norm + 1e-20; 1 for a row or column of zeros, whose scale would grow without end."""
    return torch.where(norm > 0, norm + TINY, 1.0)
