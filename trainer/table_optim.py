"""How Engram tables learn: Adam on the rows a step has read, or the published momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.engram.store import LocalStore
from trainer.sinkhorn import sinkhorn_step


class TableOptimizer(Protocol):
    """How Engram tables learn from the rows that a step has read."""

    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        """Learn from rows `ids` (per layer [U] int64, distinct, ascending) and their gradients
        [U, head_dim]."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live state as "layers.N.engram.embed/<state name>"; writing into it restores it."""
        ...


class SinkhornTables:
    """Sinkhorn-balanced momentum over whole tables, as published: rows that a step has not read
    move on by their momentum. State by layer: `momentum` fp32 [rows, head_dim]."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._momentum = [torch.zeros_like(w, dtype=torch.float32) for w in store.weight]

    @torch.no_grad()
    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        tables = zip(self._store.weight, self._momentum, ids, grads, strict=True)
        for weight, momentum, rows, grad in tables:
            sinkhorn_step(weight, momentum, grad, lr=lr, ids=rows)

    def tensors(self) -> dict[str, Tensor]:
        named = zip(self._store.layers, self._momentum, strict=True)
        return {f"layers.{layer}.engram.embed/momentum": tensor for layer, tensor in named}


class SparseAdam:
    """Adam over table rows with a gradient; rows that a step did not read stay as they are.

    Each row counts its own steps: its moments decay, and its bias correction advances, only when
    the row is read. So a row seen for the first time late in training takes a full first step, and
    no dense gradient or table-sized temporary exists. There is no weight decay.

    State by layer: `exp_avg`, `exp_avg_sq` fp32 [rows, head_dim] and `steps` int32 [rows].
    """

    def __init__(self, store: LocalStore, *, beta1: float, beta2: float, eps: float) -> None:
        self._store = store
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self._first = [torch.zeros_like(w, dtype=torch.float32) for w in store.weight]
        self._second = [torch.zeros_like(w, dtype=torch.float32) for w in store.weight]
        self._steps = [torch.zeros(w.shape[0], dtype=torch.int32) for w in store.weight]

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
            weight = self._store.weight[layer]
            weight.index_add_(0, rows, change.to(weight.dtype), alpha=-1)

    def tensors(self) -> dict[str, Tensor]:
        """The live state as "layers.N.engram.embed/<state name>"; writing into it restores it."""
        named = zip(self._store.layers, self._first, self._second, self._steps, strict=True)
        return {
            f"layers.{layer}.engram.embed/{name}": tensor
            for layer, first, second, steps in named
            for name, tensor in (("exp_avg", first), ("exp_avg_sq", second), ("steps", steps))
        }
