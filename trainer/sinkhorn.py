"""Sinkhorn-balanced momentum: updates whose rows and columns all have the same size.

For tables of vectors (Engram tables, embedding, head), most rows of which see few gradients. With
M the momentum and G the gradient [rows, n]:

    M = 0.95 M + 0.05 G;  N = 0.95 M + 0.05 G;  rows of N not above 1e-3 of the mean row norm are
    left out;  eleven times, rows first and last: divide N's rows, then columns, by their norms;
    W -= 0.18 lr sqrt(n) N.

N and its balanced form never exist whole: two vectors of scales, r and c, say what they are, and
seven passes go over tiles of rows. The norms of r_i N_ij c_j come from the squares of N:

    rows r_i sqrt(sum_j N_ij^2 c_j^2), columns c_j sqrt(sum_i r_i^2 N_ij^2).

Where several ranks divide the rows, the mean row norm and the column norms are those of the whole
table.
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
# Of a tile's temporaries: what a core's cache holds, or enough for an accelerator to be busy.
HOST_VALUES, DEVICE_VALUES = 1 << 18, 1 << 24


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
        values = HOST_VALUES if momentum.device.type == "cpu" else DEVICE_VALUES
        self.step = max(1, values // columns)
        self.edges = list(range(0, rows, self.step))
        self.room = momentum.new_empty(min(self.step, rows), columns)
        bounds = torch.tensor([*self.edges, rows], device=momentum.device)
        self.parts = [] if ids is None else torch.searchsorted(ids, bounds).tolist()

    def tiles(self, scale: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(its rows, scale * N [up to `step`, n], the caller's to change until the next one).

        scale: fp32 scalar.
        """
        old, new = MOMENTUM * scale, (1 - MOMENTUM) * scale
        for number, low in enumerate(self.edges):
            momentum = self.momentum[low : low + self.step]
            here = slice(low, low + len(momentum))
            tile = torch.mul(momentum, old, out=self.room[: len(momentum)])
            if self.ids is None:
                tile.addcmul_(self.grad[here], new)
            else:
                own = slice(self.parts[number], self.parts[number + 1])
                tile.index_add_(0, self.ids[own] - low, self.grad[own] * new)
            yield here, tile


def _balance(weight: Tensor, update: _Update, *, lr: float, group: Group) -> None:
    """Take N, balanced, from the weight.

    A pass over the tiles ends one round of the rows and begins the next one of the columns. The
    squares are those of N over its mean row norm: a gradient's own would be too small for fp32.
    """
    rows, columns = weight.shape
    row = update.momentum.new_empty(rows)
    column = update.momentum.new_ones(columns)
    for here, tile in update.tiles(update.momentum.new_tensor(1.0)):
        torch.linalg.vector_norm(tile, dim=1, out=row[here])
    mean = _mean(row, group)
    row = torch.where(row > LEAST_ROW * mean, _divisor(row).reciprocal_() * mean, 0.0).float()
    scale = torch.where(mean > 0, 1 / mean, 0.0).float()
    for number in range(ROUNDS // 2):
        squares = torch.zeros(columns, dtype=torch.float64, device=row.device)
        for here, tile in update.tiles(scale):
            own, square = row[here], tile.square_()
            if number > 0:
                _end_round(square, own, column)
            squares += own.square() @ square
        group.all_reduce_sum(squares)
        column.div_(_divisor(column * squares.sqrt_().float()))
    size = SCALE * lr * columns**0.5
    for here, tile in update.tiles(scale):
        own = row[here]
        _end_round(tile.square(), own, column)
        weight[here].addcmul_(tile.mul_(own[:, None]), column, value=-size)


def _end_round(square: Tensor, row: Tensor, column: Tensor) -> None:
    """Divide the scales of a tile's rows by its row norms."""
    row.div_(_divisor(row * (square @ column.square()).sqrt_()))


def _mean(values: Tensor, group: Group) -> Tensor:
    """Over all ranks, fp64."""
    own = values.sum(dtype=torch.float64)
    total, count = group.all_reduce_sum(torch.stack([own, torch.full_like(own, len(values))]))
    return total / count


def _divisor(norm: Tensor) -> Tensor:
    """norm + 1e-20; 1 for a row or column of zeros, whose scale would grow without end."""
    return torch.where(norm > 0, norm + TINY, 1.0)
