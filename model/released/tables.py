"""The Engram tables of a store, as an export wants to see them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore
from model.engram.store import RowStore
from model.names import table_name
from model.released.export import Rows, Table
from model.released.files import open_folder


def store_tables(store: RowStore, config: ModelConfig) -> dict[str, Table]:
    """Tables by released name; those that lie in safetensors can be copied from there."""
    path = Path(config.engram.path)
    mapped = config.engram.store == "mapped" and path.is_dir()
    folder = open_folder(path) if mapped and store.layers else None
    return {
        table_name(layer): Table((rows, config.engram_head_dim), _rows_of(store, index), folder)
        for index, (layer, rows) in enumerate(zip(store.layers, store.rows, strict=True))
    }


def _rows_of(store: RowStore, index: int) -> Rows:
    if isinstance(store, OwnerStore):
        return lambda low, high: store.weight[index][low:high]
    assert isinstance(store, MappedStore)
    return lambda low, high: store.read_rows(index, np.arange(low, high))
