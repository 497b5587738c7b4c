"""What a view of the run must be able to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Item:
    """What is to be shown of a step: figures, and texts as pairs of a prompt and how it went on."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
    texts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, record: dict[str, Any]) -> Item:
        """A metrics record's figures, without those that are null or not finite."""
        shown = {k: v for k, v in record.items() if v is not None and math.isfinite(v)}
        return cls(shown.pop("step"), shown)


class SinkError(Exception):
    """A view has failed for good; the message says why, for a person."""


@dataclass(frozen=True)
class Opened:
    """after: the view has all up to this step already. said: where it is, for a person."""

    after: int
    said: str


class Sink(Protocol):
    """One view. All but `kill` are called in the tracker's thread; each raises SinkError."""

    label: str

    def open(self) -> Opened: ...

    def send(self, items: Sequence[Item]) -> None: ...

    def close(self, *, done: bool) -> None:
        """End, when all is shown; done: the run is complete."""
        ...

    def kill(self) -> None:
        """Give up at once whatever is going on, from another thread."""
        ...
