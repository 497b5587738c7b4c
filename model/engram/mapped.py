"""Frozen Engram tables read by row id out of files, in the background one step ahead."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.config import ModelConfig
from model.engram.distinct import Distinct, agreed_windows
from model.engram.primaries import TableGradients
from model.engram.store import WINDOW_BYTES, same_tensors
from model.engram.tables.file_rows import BadTableError
from model.engram.tables.source import open_tables
from model.engram.tables.table import Table
from model.engram.window import Figures, Window
from model.parallel.group import Group

READERS = 4  # threads that wait for the disk together
LOT = 2048  # rows that one of them reads and decodes at a time


class MappedStore:
    """Read-only tables in the files at config.engram.path; only the rows of a step are read.

    Each distinct row of a window is read once, in ascending order, by every rank for itself.
    `read_ahead` begins with the next step's first window while the present one computes, so up to
    two windows of values exist, in the model's dtype. What a window holds depends on its row ids
    alone, never on what was read ahead. Windows carry no gradient, and a checkpoint holds the
    fingerprint in place of the tables.
    """

    looks_ahead = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        token_map: np.ndarray | None,
        world: Group | None = None,
        window_bytes: int = WINDOW_BYTES,
        device: torch.device | None = None,
    ) -> None:
        """world: the ranks that stop together when one cannot read on. device: where the model
        wants its rows; the CPU by default.

        ValueError lists everything that keeps the files from serving; see `open_tables`.
        """
        self.layers = config.engram_layers
        self.rows = config.engram_num_embeddings[: len(self.layers)]
        self._path, self._dim = config.engram.path, config.engram_head_dim
        self._dtype = getattr(torch, config.dtype)
        self._most = max(1, window_bytes // (self._dim * self._dtype.itemsize))
        self._world, self._device = world or Group(), device or torch.device("cpu")
        self._tables = open_tables(config, token_map=token_map)
        self._ahead: list[tuple[list[Tensor], list[Distinct], Future[Window]]] = []
        self._figures = Figures()
        # Two pools: a window's own thread waits for its readers.
        self._windows = ThreadPoolExecutor(1, thread_name_prefix="engram-window")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="engram-rows")

    def read_ahead(self, rows: list[Tensor]) -> None:
        """Begin to read the first window of those that `windows` will be asked for, with these very
        tensors."""
        parts = self._divided(rows, most=self._most)
        self._ahead.append((rows, parts, self._begin(parts[0])))

    def windows(self, rows: list[Tensor]) -> Iterator[Window]:
        """As RowStore.windows. BadTableError, on all ranks, names a row that holds no finite
        numbers, or a file that failed, on any of them."""
        parts, reading = self._begun(rows)
        for number in range(len(parts)):
            window = self._read(reading)
            if number + 1 < len(parts):
                reading = self._begin(parts[number + 1])
            yield window

    def open_window(self, rows: list[Tensor]) -> Window:
        """As RowStore.open_window; BadTableError as `windows`."""
        (part,) = self._divided(rows, most=None)
        return self._read(self._begin(part))

    def collect(self) -> TableGradients:
        """None: these tables do not learn."""
        return TableGradients([], [])

    def take_figures(self) -> Figures:
        """What look-ups have cost since this was last asked."""
        found, self._figures = self._figures, Figures()
        return found

    def read_rows(self, index: int, ids: np.ndarray) -> Tensor:
        """Rows `ids` (int64, ascending) of the index-th Engram layer's table: [n, head_dim]."""
        return self._rows_of(self._tables[index], ids)

    def fingerprint(self) -> dict[str, Any]:
        tables = [table.fingerprint() for table in self._tables]
        return {"store": "mapped", "source": self._path, "tables": tables}

    def close(self) -> None:
        self._ahead.clear()
        self._windows.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        for table in self._tables:
            table.close()

    def _begun(self, rows: list[Tensor]) -> tuple[list[Distinct], Future[Window]]:
        for number, (asked, parts, reading) in enumerate(self._ahead):
            if same_tensors(asked, rows):
                del self._ahead[number]
                return parts, reading
        parts = self._divided(rows, most=self._most)
        return parts, self._begin(parts[0])

    def _divided(self, rows: Sequence[Tensor], *, most: int | None) -> list[Distinct]:
        return agreed_windows(
            rows, layers=self.layers, counts=self.rows, most=most, world=self._world
        )

    def _begin(self, part: Distinct) -> Future[Window]:
        def read() -> Window:
            tables = zip(self._tables, part.ids, strict=True)
            values = [self._moved(self._rows_of(table, ids.numpy())) for table, ids in tables]
            inverses = [[self._moved(own) for own in batch] for batch in part.inverses]
            return Window(part.ids, values, inverses, grads=[])

        return self._windows.submit(read)

    def _read(self, reading: Future[Window]) -> Window:
        begin = time.perf_counter()
        error = reading.exception()
        if error is not None and not isinstance(error, BadTableError):
            raise error
        if self._world.any(error is not None):
            raise error or BadTableError("another rank could not read its Engram rows; see its log")
        window = reading.result()
        self._figures.waited += time.perf_counter() - begin
        self._figures.reads += sum(i.numel() for inverses in window.inverses for i in inverses)
        self._figures.distinct += sum(len(ids) for ids in window.ids)
        return window

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)

    def _rows_of(self, table: Table, ids: np.ndarray) -> Tensor:
        values = torch.empty(len(ids), self._dim, dtype=self._dtype)

        def fill(low: int) -> None:
            values[low : low + LOT] = table.read(ids[low : low + LOT])

        for _ in self._readers.map(fill, range(0, len(ids), LOT)):
            pass
        return values
