"""A run's model in one of its checkpoints, one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from model.config import ModelConfig
from model.empty import without_memory
from model.names import table_name
from model.released.layout import Shape
from model.transformer import DeepseekV41
from trainer.checkpoint.reading import CheckpointReader, read_tensors


class SavedModel:
    """The model, and the tables that it learns, of a whole checkpoint; however many ranks wrote it.

    shapes: by our names, tables by their released ones. While a tensor is read, its memory is
    needed twice.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._reader = CheckpointReader(folder)
        with without_memory():
            state = DeepseekV41(config).state_dict()
        self._saved = {name: ("model", tensor) for name, tensor in state.items()}
        if config.engram.store != "mapped":
            rows = config.engram_num_embeddings
            for layer, count in zip(config.engram_layers, rows, strict=False):
                table = torch.empty(count, config.engram_head_dim, device="meta")
                self._saved[table_name(layer)] = ("tables", table)
        self.shapes: dict[str, Shape] = {n: tuple(t.shape) for n, (_, t) in self._saved.items()}

    def load(self, name: str) -> Tensor:
        """The tensor of that name. ValueError when the checkpoint is another model's."""
        part, like = self._saved[name]
        tensor = torch.empty_like(like, device="cpu")
        read_tensors(self._reader, {f"{part}/{name}": tensor}, whole=False)
        return tensor
