"""How Engram tables learn: by the published momentum, or on the rows alone that a step has read.

State lies beside the rows that this rank masters and has their number of rows. The sparse rules go
over the rows read in tiles, so that beyond weights, state and the rows' gradients they need a few
megabytes, whatever the table's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from model.engram.owners import OwnerStore
from trainer.config import OptimConfig
from trainer.sinkhorn import sinkhorn_step

TILE_VALUES = 1 << 16  # of a tile's temporaries: a quarter of a megabyte each


class TableOptimizer(Protocol):
    """How the Engram rows that this rank masters learn from those that a step has read.

    sparse: whether a step changes the rows of its ids alone; else it may change every row.
    """

    sparse: bool

    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        """Learn from rows `ids` (per layer [U] int64, distinct, ascending, relative to the
        primary range) and their gradients [U, head_dim]. All ranks take it together."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live state as "layers.N.engram.embed/<state name>"; writing into it restores it."""
        ...


def build_table_optimizer(store: OwnerStore, optim: OptimConfig) -> TableOptimizer | None:
    """The rule that `optim` names, its state allocated at once; None for frozen tables."""
    match optim.table_rule:
        case "sinkhorn":
            return SinkhornTables(store)
        case "sparse_adam":
            return SparseAdam(store, beta1=optim.beta1, beta2=optim.beta2, eps=optim.eps)
        case "rowwise_adagrad":
            return RowwiseAdagrad(store, eps=optim.eps)
        case "frozen":
            return None


class _Tables:
    """By layer, the primary weight and its state by name."""

    def __init__(self, store: OwnerStore, state: Sequence[dict[str, Tensor]]) -> None:
        self._store, self._state = store, state

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"layers.{layer}.engram.embed/{name}": self._store.as_global(index, tensor)
            for index, (layer, state) in enumerate(
                zip(self._store.layers, self._state, strict=True)
            )
            for name, tensor in state.items()
        }

    def _layers(
        self, ids: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor, Tensor]]:
        """(weight, state, row ids, their gradients) of each layer."""
        weights = [table.weight for table in self._store.primary]
        return zip(weights, self._state, ids, grads, strict=True)

    def _tiles(
        self, ids: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, dict[str, Tensor], Tensor, Tensor]]:
        """The same for a few rows at a time."""
        for weight, state, rows, grad in self._layers(ids, grads):
            size = max(1, TILE_VALUES // weight.shape[1])
            for some, own in zip(rows.split(size), grad.split(size), strict=True):
                if len(some):
                    yield weight, state, some, own


class SinkhornTables(_Tables):
    """Sinkhorn-balanced momentum over whole tables, as published: rows that a step has not read
    move on by their momentum. State by layer: `momentum` fp32 [rows, head_dim]."""

    sparse = False

    def __init__(self, store: OwnerStore) -> None:
        super().__init__(store, [{"momentum": torch.zeros_like(t.weight)} for t in store.primary])

    @torch.no_grad()
    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        world = self._store.mesh.world
        for weight, state, rows, grad in self._layers(ids, grads):
            sinkhorn_step(weight, state["momentum"], grad, lr=lr, ids=rows, group=world)


class SparseAdam(_Tables):
    """Adam over table rows with a gradient; rows that a step did not read stay as they are.

    Each row counts its own steps: its moments decay, and its bias correction advances, only when
    the row is read. So a row seen for the first time late in training takes a full first step, and
    no dense gradient or table-sized temporary exists. There is no weight decay.

    State by layer: `exp_avg`, `exp_avg_sq` fp32 [rows, head_dim] and `steps` int32 [rows].
    """

    sparse = True

    def __init__(self, store: OwnerStore, *, beta1: float, beta2: float, eps: float) -> None:
        weights = [table.weight for table in store.primary]
        state = [
            {
                "exp_avg": torch.zeros_like(w),
                "exp_avg_sq": torch.zeros_like(w),
                "steps": torch.zeros(w.shape[0], dtype=torch.int32, device=w.device),
            }
            for w in weights
        ]
        super().__init__(store, state)
        self._beta1, self._beta2, self._eps = beta1, beta2, eps

    @torch.no_grad()
    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        for weight, state, rows, grad in self._tiles(ids, grads):
            steps = state["steps"].index_select(0, rows).add_(1)
            state["steps"].index_copy_(0, rows, steps)
            first = state["exp_avg"].index_select(0, rows).lerp_(grad, 1 - self._beta1)
            _put_rows(state["exp_avg"], rows, first)
            second = state["exp_avg_sq"].index_select(0, rows)
            second.mul_(self._beta2).addcmul_(grad, grad, value=1 - self._beta2)
            _put_rows(state["exp_avg_sq"], rows, second)
            # With u = sqrt(1 - beta2^t): m / (sqrt(v) / u + eps) is m u / (sqrt(v) + eps u).
            count = steps.double()[:, None]
            unbiased = (1 - self._beta2**count).sqrt_()
            size = (lr * unbiased / (1 - self._beta1**count)).float()
            first.mul_(size).div_(second.sqrt_().add_((self._eps * unbiased).float()))
            _put_rows(weight, rows, weight.index_select(0, rows).sub_(first))


class RowwiseAdagrad(_Tables):
    """Adagrad with one number a row: a_i += mean_j g_ij^2; w_i -= lr * g_i / (sqrt(a_i) + eps).

    The rows with a gradient alone, no momentum, no weight decay: the state is 1 / head_dim of the
    table's size. A row's steps shrink as its gradients add up.

    State by layer: `sum_sq` fp32 [rows].
    """

    sparse = True

    def __init__(self, store: OwnerStore, *, eps: float) -> None:
        weights = [table.weight for table in store.primary]
        super().__init__(store, [{"sum_sq": torch.zeros_like(w[:, 0])} for w in weights])
        self._eps = eps

    @torch.no_grad()
    def step(self, ids: Sequence[Tensor], grads: Sequence[Tensor], *, lr: float) -> None:
        for weight, state, rows, grad in self._tiles(ids, grads):
            total = state["sum_sq"].index_select(0, rows).add_(grad.square().mean(1))
            state["sum_sq"].index_copy_(0, rows, total)
            change = grad / total.sqrt_().add_(self._eps)[:, None]
            _put_rows(weight, rows, weight.index_select(0, rows).sub_(change, alpha=lr))


def _put_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """table[rows] = values, for distinct rows."""
    if table.shape[1] % 4 == 0 and table.device.type == "cpu":
        # A CPU copies these element by element: sixteen bytes a time take half as long as four.
        table, values = table.view(torch.complex128), values.view(torch.complex128)
    table.index_copy_(0, rows, values)
