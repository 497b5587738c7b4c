"""What the model's users ask of the Engram tables, wherever these live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from model.engram.primaries import TableGradients
from model.engram.window import Figures, Window

WINDOW_BYTES = 256 << 20


class RowStore(Protocol):
    """The tables of a model's Engram layers, whatever they are made of.

    All ranks of a run call the same methods in the same order. Rows of micro-batches are host
    tensors, each [B, S, Engram layers, columns] int64. ValueError, on all ranks at once, names a
    row id outside its table: a wrong id would read another row in silence.

    layers: the Engram layers of this model. rows: how many rows each one's table has. looks_ahead:
    whether `read_ahead` is worth having the next step's rows early.
    """

    layers: tuple[int, ...]
    rows: tuple[int, ...]
    looks_ahead: bool

    def read_ahead(self, rows: list[Tensor]) -> None:
        """Begin what `windows` will need for these very tensors, all but values that a step may
        still change."""
        ...

    def windows(self, rows: list[Tensor]) -> Iterator[Window]:
        """The windows of a step's micro-batches, in order; as many micro-batches on each rank.

        Each is fetched while the caller works on the one before. Bounded in bytes, but no smaller
        than a micro-batch.
        """
        ...

    def collect(self) -> TableGradients:
        """The gradients of the step whose `windows` have gone by; none of frozen tables."""
        ...

    def open_window(self, rows: list[Tensor]) -> Window:
        """One window of some micro-batches, of any size; fetched here and now."""
        ...

    def take_figures(self) -> Figures:
        """What look-ups have cost since this was last asked."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What tells these tables from others, as plain data: sizes, and a hash of some rows."""
        ...

    def close(self) -> None:
        """Release files and threads."""
        ...


def same_tensors(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are the very same tensors."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
