"""How Engram tables learn: Adam on the rows a step has read, or the published momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.engram.owners import OwnerStore
from trainer.sinkhorn import sinkhorn_step


class TableOptimizer(Protocol):
    """How the Engram rows that this rank masters learn from those that a step has read.

    sparse: whether a step changes the rows of its ids alone; else it may change every row.
    """

    sparse: bool

    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        """Learn from rows `ids` (per layer [U] int64, distinct, ascending, relative to the
        primary range) and their gradients [U, head_dim]."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live state as "layers.N.engram.embed/<state name>"; writing into it restores it."""
        ...


class SinkhornTables:
    """Sinkhorn-balanced momentum over whole tables, as published: rows that a step has not read
    move on by their momentum. State by layer: `momentum` fp32 [rows, head_dim]."""

    sparse = False

    def __init__(self, store: OwnerStore) -> None:
        self._store = store
        self._momentum = [torch.zeros_like(table.weight) for table in store.primary]

    @torch.no_grad()
    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        tables = zip(self._store.primary, self._momentum, ids, grads, strict=True)
        for table, momentum, rows, grad in tables:
            sinkhorn_step(table.weight, momentum, grad, lr=lr, ids=rows)

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"layers.{layer}.engram.embed/momentum": self._store.as_global(index, tensor)
            for index, (layer, tensor) in enumerate(
                zip(self._store.layers, self._momentum, strict=True)
            )
        }


class SparseAdam:
    """Adam over table rows with a gradient; rows that a step did not read stay as they are.

    Each row counts its own steps: its moments decay, and its bias correction advances, only when
    the row is read. So a row seen for the first time late in training takes a full first step, and
    no dense gradient or table-sized temporary exists. There is no weight decay.

    State by layer: `exp_avg`, `exp_avg_sq` fp32 [rows, head_dim] and `steps` int32 [rows].
    """

    sparse = True

    def __init__(self, store: OwnerStore, *, beta1: float, beta2: float, eps: float) -> None:
        self._store = store
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        tables = [table.weight for table in store.primary]
        self._first = [torch.zeros_like(w) for w in tables]
        self._second = [torch.zeros_like(w) for w in tables]
        self._steps = [torch.zeros(w.shape[0], dtype=torch.int32) for w in tables]

    @torch.no_grad()
    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        """Update rows `ids` (per layer [U] int64, distinct) by their gradients [U, head_dim]."""
        for layer, (rows, grad) in enumerate(zip(ids, grads, strict=True)):
            steps = self._steps[layer].index_select(0, rows) + 1
            first = self._first[layer].index_select(0, rows).lerp_(grad, 1 - self._beta1)
            second = self._second[layer].index_select(0, rows)
            second.mul_(self._beta2).addcmul_(grad, grad, value=1 - self._beta2)
            count = steps.double()[:, None]
            unbiased = (1 - self._beta2**count).sqrt().float()
            size = (lr / (1 - self._beta1**count)).float()
            change = first / (second.sqrt().div_(unbiased).add_(self._eps)) * size
            self._steps[layer].index_copy_(0, rows, steps)
            self._first[layer].index_copy_(0, rows, first)
            self._second[layer].index_copy_(0, rows, second)
            self._store.primary[layer].weight.index_add_(0, rows, change, alpha=-1)

    def tensors(self) -> dict[str, Tensor]:
        """The live state as "layers.N.engram.embed/<state name>"; writing into it restores it."""
        named = zip(self._store.layers, self._first, self._second, self._steps, strict=True)
        return {
            f"layers.{layer}.engram.embed/{name}": self._store.as_global(index, tensor)
            for index, (layer, first, second, steps) in enumerate(named)
            for name, tensor in (("exp_avg", first), ("exp_avg_sq", second), ("steps", steps))
        }
