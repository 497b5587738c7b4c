"""Muon: momentum, orthogonalised, for every matrix that the model multiplies by.

With M the momentum, G the gradient and NS the orthogonalisation of a matrix [n, m]:

    M = 0.95 M + G;  W -= lr * (0.18 sqrt(max(n, m)) * NS(0.95 M + G) + weight_decay W).

Of a parameter that several ranks hold together each one keeps its own rows and their momentum.
Matrices that lie whole in a shard (heads, groups, experts) are orthogonalised there; the others
travel, see `trainer.muon_exchange`. All is a function of the gradients alone and repeats bit for
bit; ranks with equal copies of a matrix compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.parallel.group import Group
from trainer.momentum import MomentumRule
from trainer.muon_exchange import Exchange
from trainer.shards import local_part, shard_group

MOMENTUM = 0.95
SCALE = 0.18  # gives an update the size that AdamW's usually have
WEIGHT_DECAY = 0.1
# Newton-Schulz coefficients: eight steps that grow small singular values fast, two that settle
# all of them at one.
FAST, SETTLE = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
STEPS = (FAST,) * 8 + (SETTLE,) * 2
BATCH_BYTES = 256 << 20  # of the whole fp32 matrices that a rank works on at a time, if above one


class Muon(MomentumRule):
    """Muon over tensors [..., rows, columns], whose leading dimensions stack matrices: whole on
    this rank, or DTensors divided along rows and the first of the leading dimensions."""

    def __init__(
        self, named: Sequence[tuple[str, Tensor]], blocks: Sequence[Sequence[int]], *, lr: float
    ) -> None:
        """blocks: per tensor, how its rows divide into matrices of their own (heads, groups),
        summing up to `rows`; (rows,) for none."""
        super().__init__("muon", named, lr=lr)
        members = zip(self.group["params"], blocks, strict=True)
        self._members = [_Member.of(tensor, own) for tensor, own in members]
        self._plans: dict[tuple[int, ...], list[_Batch]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient, in place; the same ones on all ranks."""
        lr, params = self.group["lr"], self.group["params"]
        present = tuple(n for n, tensor in enumerate(params) if tensor.grad is not None)
        parts: dict[int, _Part] = {}
        for number in present:
            tensor = params[number]
            whole = (tensor, tensor.grad, self.state[tensor]["momentum"])
            part = parts[number] = _Part(*(_stacked(local_part(t)) for t in whole))
            part.momentum.mul_(MOMENTUM).add_(part.grad)
            part.weight.mul_(1 - lr * WEIGHT_DECAY)
        if present not in self._plans:  # images come in some steps only
            self._plans[present] = list(_plan(self._members, present))
        for batch in self._plans[present]:
            batch.step(parts, lr=lr)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Each of [..., n, m] with its singular values brought near one (a zero matrix stays zero).

    Newton-Schulz: X <- a X + (b A + c A^2) X with A = X X^T, from X of Frobenius norm one.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    stack = matrices.reshape(-1, *matrices.shape[-2:])
    x = stack.mT if tall else stack
    norm = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / torch.where(norm > 0, norm, 1.0)
    for a, b, c in STEPS:
        square = x @ x.mT
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape)


@dataclass(frozen=True)
class _Part:
    """What this rank holds of one parameter, each [stacked, rows, columns]."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor


@dataclass(frozen=True)
class _Member:
    """Geometry of one parameter: `stacked` local matrices of `rows` in all, divided over `group`
    and into `blocks`."""

    stacked: int
    rows: int
    columns: int
    blocks: tuple[int, ...]
    group: Group
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor, blocks: Sequence[int]) -> _Member:
        assert sum(blocks) == tensor.shape[-2]
        assert shard_group(tensor, dim=-1).size == 1
        rows, columns = tensor.shape[-2:]
        stacked = local_part(tensor).shape[:-2].numel()
        group = shard_group(tensor, dim=-2)
        return cls(stacked, rows, columns, tuple(blocks), group, tensor.device)

    @property
    def share(self) -> int:
        """Rows of a rank: the last ones may have fewer, or none."""
        return -(-self.rows // self.group.size)


@dataclass(frozen=True)
class _Block:
    """Rows [low, high) of the whole of a parameter's stacked matrices first..last: one matrix
    each."""

    number: int
    member: _Member
    first: int
    last: int
    low: int
    high: int

    def rows_on(self, rank: int) -> tuple[int, int]:
        """Which rows of a rank's part belong to these matrices."""
        first = rank * self.member.share
        low, high = max(self.low, first), min(self.high, first + self.member.share)
        return (low - first, high - first) if low < high else (0, 0)

    def heights(self) -> list[int]:
        """How many rows of each matrix every rank has."""
        spans = (self.rows_on(rank) for rank in range(self.member.group.size))
        return [high - low for low, high in spans]

    def holder(self) -> int | None:
        """The rank that has all rows, if one does."""
        rank = self.low // self.member.share
        return rank if self.high <= (rank + 1) * self.member.share else None


class _Batch:
    """Matrices [n, m] that are orthogonalised together: all here, or one by one over a group."""

    def __init__(self, blocks: list[_Block], shape: tuple[int, int], exchange: Exchange | None):
        self._blocks, self._shape, self._exchange = blocks, shape, exchange

    def step(self, parts: dict[int, _Part], *, lr: float) -> None:
        """Orthogonalise what the momentum and the gradient say, and move the weights."""
        size = max(self._shape) ** 0.5 * SCALE
        moved = [_rows(parts[block.number], block) for block in self._blocks]
        update = [torch.add(grad, m, alpha=MOMENTUM) for _, grad, m in moved]
        rows = torch.cat([part.flatten(0, 1) for part in update])
        del update
        if self._exchange is not None:
            rows = self._exchange.gather(rows)
        rows = orthogonalised(rows.view(-1, *self._shape)).reshape(-1, self._shape[1])
        if self._exchange is not None:
            rows = self._exchange.scatter(rows)
        counts = [weight.shape[0] * weight.shape[1] for weight, _, _ in moved]
        for (weight, _, _), part in zip(moved, rows.split(counts), strict=True):
            weight.add_(part.view(weight.shape), alpha=-lr * size)


def _plan(members: Sequence[_Member], present: Sequence[int]) -> Iterator[_Batch]:
    """The batches of a step: first those that need nobody else, then, in an order that is the same
    on all ranks, those that travel."""
    here: dict[tuple[int, int], list[_Block]] = {}
    away: dict[tuple[Group, tuple[int, int]], list[_Block]] = {}
    for number in present:
        member, low = members[number], 0
        for height in member.blocks:
            block = _Block(number, member, 0, member.stacked, low, low + height)
            shape = (height, member.columns)
            holder = block.holder()
            if holder is None:
                away.setdefault((member.group, shape), []).append(block)
            elif holder == member.group.rank:
                here.setdefault(shape, []).append(block)
            low += height
    for shape, blocks in here.items():
        for chosen in _limited(blocks, shape, ranks=1):
            yield _Batch(chosen, shape, None)
    begun: dict[Group, int] = {}
    for (group, shape), blocks in away.items():
        for chosen in _limited(blocks, shape, ranks=group.size):
            held = [block.heights() for block in chosen for _ in range(block.first, block.last)]
            start = begun.get(group, 0)
            begun[group] = start + len(held)
            device = chosen[0].member.device
            yield _Batch(chosen, shape, Exchange(held, group, start=start, device=device))


def _limited(blocks: list[_Block], shape: tuple[int, int], *, ranks: int) -> Iterator[list[_Block]]:
    """Runs of blocks, stacks cut where needed, of at most BATCH_BYTES a rank or one matrix."""
    most = max(1, BATCH_BYTES // (4 * shape[0] * shape[1])) * ranks
    run: list[_Block] = []
    room = most
    for block in blocks:
        at = block.first
        while at < block.last:
            last = min(block.last, at + room)
            run.append(_Block(block.number, block.member, at, last, block.low, block.high))
            room -= last - at
            at = last
            if room == 0:
                yield run
                run, room = [], most
    if run:
        yield run


def _rows(part: _Part, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the block's weight, gradient and momentum on this rank, [stacked, rows, columns]."""
    low, high = block.rows_on(block.member.group.rank)
    where = (slice(block.first, block.last), slice(low, high))
    return part.weight[where], part.grad[where], part.momentum[where]


def _stacked(tensor: Tensor) -> Tensor:
    """[..., rows, columns] as a view [stacked, rows, columns]."""
    return tensor.view(tensor.shape[:-2].numel(), *tensor.shape[-2:])
