"""Where the Engram tables live, and the windows through which a step reads and corrects them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engram.init import initial_table
from model.engram.rows import EngramRows


@dataclass(frozen=True)
class Window:
    """The distinct rows of several micro-batches, by Engram layer, and their gradient."""

    ids: list[Tensor]  # per layer [U] int64, ascending
    values: list[Tensor]  # per layer [U, head_dim]
    grads: list[Tensor]  # per layer [U, head_dim] fp32, summed over the window's micro-batches
    inverses: list[list[Tensor]]  # per micro-batch and layer [B, S, columns] int64

    def rows(self, micro_batch: int) -> list[EngramRows]:
        """One EngramRows a layer for this micro-batch; all share the window's gradient buffers."""
        parts = zip(self.values, self.inverses[micro_batch], self.grads, strict=True)
        return [EngramRows(value, inverse, grad) for value, inverse, grad in parts]


class LocalStore:
    """Whole tables in this process's memory.

    A row's initial value is a function of (seed, layer, row id) alone, so any later division of the
    tables over processes starts from the same numbers.
    """

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        self.layers = config.engram_layers
        self.rows = config.engram_num_embeddings[: len(self.layers)]
        std, dim = config.initializer_range, config.engram_head_dim
        self.weight = [
            initial_table(count, dim, layer=n, seed=seed, std=std)
            for n, count in zip(self.layers, self.rows, strict=True)
        ]

    def open_window(self, rows: list[Tensor]) -> Window:
        """Fetch the distinct rows of some micro-batches, each [B, S, Engram layers, columns] int64.

        ValueError names a row id outside its table: a wrong id would read another row in silence.
        """
        window = Window([], [], [], [[] for _ in rows])
        for index, (layer, count) in enumerate(zip(self.layers, self.rows, strict=True)):
            parts = [batch[:, :, index] for batch in rows]
            every = torch.cat([part.flatten() for part in parts])
            ids, inverse = torch.unique(every, return_inverse=True)
            if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= count):
                raise ValueError(
                    f"Engram row ids of layer {layer} reach from {int(ids[0])} to {int(ids[-1])}, "
                    f"outside its {count} rows: the batch was hashed for another geometry"
                )
            window.ids.append(ids)
            window.values.append(self.weight[index].index_select(0, ids))
            window.grads.append(torch.zeros_like(window.values[-1], dtype=torch.float32))
            sizes = [part.numel() for part in parts]
            for found, part, own in zip(window.inverses, parts, inverse.split(sizes), strict=True):
                found.append(own.view(part.shape))
        return window
