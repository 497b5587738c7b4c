"""Frozen Engram tables read by row id out of files, in the background one step ahead."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.engram.store import Window, distinct_rows
from model.engram.tables.source import open_tables
from model.engram.tables.table import Table

READERS = 4  # threads that wait for the disk together
LOT = 2048  # rows that one of them reads and decodes at a time


class MappedStore:
    """Read-only tables in the files at config.engram.path; only the rows of a step are read.

    Each distinct row of a window is read once, in ascending order. `read_ahead` starts reading the
    next window while the present one computes, so up to two windows of values exist, in the
    model's dtype. What a window holds depends on its row ids alone, never on what was read ahead.
    Windows carry no gradient, and a checkpoint holds the fingerprint in place of the tables.
    """

    def __init__(self, config: ModelConfig, *, token_map: np.ndarray | None) -> None:
        """ValueError lists everything that keeps the files from serving; see `open_tables`."""
        self.layers = config.engram_layers
        self.rows = config.engram_num_embeddings[: len(self.layers)]
        self._path, self._dim = config.engram.path, config.engram_head_dim
        self._dtype = getattr(torch, config.dtype)
        self._tables = open_tables(config, token_map=token_map)
        self._ahead: list[tuple[list[Tensor], Future[Window]]] = []
        # Two pools: a window's own thread waits for its readers.
        self._windows = ThreadPoolExecutor(1, thread_name_prefix="engram-window")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="engram-rows")

    def read_ahead(self, rows: list[Tensor]) -> None:
        """Begin to read the window that open_window will be asked for, with these very tensors."""
        self._ahead.append((rows, self._windows.submit(self._read_window, rows)))

    def open_window(self, rows: list[Tensor]) -> Window:
        """As RowStore.open_window. Waits for what `read_ahead` began; else reads here and now.

        BadTableError names a row that holds no finite numbers, or a file that failed.
        """
        for number, (asked, window) in enumerate(self._ahead):
            if len(asked) == len(rows) and all(a is b for a, b in zip(asked, rows, strict=True)):
                del self._ahead[number]
                return window.result()
        return self._read_window(rows)

    def read_rows(self, index: int, ids: np.ndarray) -> Tensor:
        """Rows `ids` (int64, ascending) of the index-th Engram layer's table: [n, head_dim]."""
        return self._read(self._tables[index], ids)

    def fingerprint(self) -> dict[str, Any]:
        tables = [table.fingerprint() for table in self._tables]
        return {"store": "mapped", "source": self._path, "tables": tables}

    def close(self) -> None:
        self._ahead.clear()
        self._windows.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        for table in self._tables:
            table.close()

    def _read_window(self, rows: Sequence[Tensor]) -> Window:
        ids, inverses = distinct_rows(rows, layers=self.layers, counts=self.rows)
        values = [self._read(t, own.numpy()) for t, own in zip(self._tables, ids, strict=True)]
        return Window(ids, values, inverses, grads=[])

    def _read(self, table: Table, ids: np.ndarray) -> Tensor:
        values = torch.empty(len(ids), self._dim, dtype=self._dtype)

        def fill(low: int) -> None:
            values[low : low + LOT] = table.read(ids[low : low + LOT])

        for _ in self._readers.map(fill, range(0, len(ids), LOT)):
            pass
        return values
