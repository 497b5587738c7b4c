"""The Engram tables that learn, in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engram.init import initial_table
from model.engram.primaries import PrimaryTable
from model.engram.store import Window, distinct_rows
from model.engram.tables.table import sampled_rows
from model.parallel.mesh import Mesh


class OwnerStore:
    """Tables in memory that learn with the model.

    A row's initial value is a function of (seed, layer, row id) alone, so any division of the
    tables over ranks starts from the same numbers.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int | None,
        mesh: Mesh | None = None,
        learns: bool = True,
    ) -> None:
        """seed: of the initial values; None leaves them undefined, for weights to be read.

        learns: False for frozen tables, for which windows hold no gradient.
        """
        self.mesh = mesh or Mesh()
        self.learns = learns
        self.layers = config.engram_layers
        self.rows = config.engram_num_embeddings[: len(self.layers)]
        std, dim = config.initializer_range, config.engram_head_dim
        self.weight = [
            torch.empty(count, dim)
            if seed is None
            else initial_table(count, dim, layer=n, seed=seed, std=std)
            for n, count in zip(self.layers, self.rows, strict=True)
        ]

    @property
    def primary(self) -> list[PrimaryTable]:
        """By layer, the rows that this rank masters; all of them where it is alone."""
        tables = zip(self.layers, self.weight, strict=True)
        return [PrimaryTable(layer, 0, weight) for layer, weight in tables]

    def publish(self, ids: Sequence[Tensor] | None) -> None:
        """Hand changed rows that this rank masters to the ranks that own copies of them.

        ids: by layer [n] int64, relative to PrimaryTable.low; None = all rows. All ranks call it
        together, after every change of primary weights and before the next look-up.
        """

    def as_global(self, index: int, tensor: Tensor) -> Tensor:
        """`tensor` [n, ...] of the primary rows of the index-th layer, as what all ranks hold
        together: a DTensor [rows, ...]; itself where this rank is alone."""
        return tensor

    def open_window(self, rows: list[Tensor]) -> Window:
        ids, inverses = distinct_rows(rows, layers=self.layers, counts=self.rows)
        values = [w.index_select(0, own) for w, own in zip(self.weight, ids, strict=True)]
        learning = values if self.learns else []
        grads = [torch.zeros_like(value, dtype=torch.float32) for value in learning]
        return Window(ids, values, inverses, grads)

    def fingerprint(self) -> dict[str, Any]:
        tables = []
        for layer, weight in zip(self.layers, self.weight, strict=True):
            sample = weight[torch.from_numpy(sampled_rows(len(weight)))].contiguous()
            digest = hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()
            size = weight.numel() * weight.element_size()
            tables.append({"name": f"layer {layer}", "bytes": size, "sampled_rows": digest})
        return {"store": "memory", "tables": tables}

    def close(self) -> None:
        pass
