"""Which rank holds which rows of the Engram tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MOST_ROWS = 2**31 - 1  # what an int32 row number can tell apart


@dataclass(frozen=True)
class Division:
    """Tables of `rows` rows, by layer, over owners x replicas ranks.

    Owner o has ceil(rows / owners) rows from o times as many on, the last ones fewer or none; there
    are no padding rows. Of an owner's rows, replica k masters the k-th ceil(own / replicas).
    Primaries are numbered p = owner * replicas + replica, in which order their rows ascend; the
    rank of one is replica * owners + owner.

    A holder's rows of all layers are numbered together, layer after layer, each from its own low:
    four bytes are enough for that number, whatever a table's size.
    """

    rows: tuple[int, ...]
    owners: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        most = sum(-(-count // self.owners) for count in self.rows)
        if most > MOST_ROWS:
            raise ValueError(
                f"parallel.engram_owners={self.owners} leaves {most:,} Engram rows to one rank, "
                f"which can number {MOST_ROWS:,}; use more owners"
            )

    def owned(self, index: int, owner: int) -> tuple[int, int]:
        """Rows [low, high) of the index-th layer that an owner holds."""
        count = self.rows[index]
        per = -(-count // self.owners)
        return min(owner * per, count), min((owner + 1) * per, count)

    def mastered(self, index: int, primary: int) -> tuple[int, int]:
        """Rows [low, high) of the index-th layer that a primary masters."""
        owner, replica = divmod(primary, self.replicas)
        low, high = self.owned(index, owner)
        per = -(-(high - low) // self.replicas)
        return min(low + replica * per, high), min(low + (replica + 1) * per, high)

    def rank(self, primary: int) -> int:
        owner, replica = divmod(primary, self.replicas)
        return replica * self.owners + owner

    def primary(self, rank: int) -> int:
        replica, owner = divmod(rank, self.owners)
        return owner * self.replicas + replica

    def owned_rows(self, owner: int) -> int:
        """Of all layers."""
        return _total(self.owned(index, owner) for index in range(len(self.rows)))

    def mastered_rows(self, primary: int) -> int:
        """Of all layers."""
        return _total(self.mastered(index, primary) for index in range(len(self.rows)))

    @cached_property
    def lows(self) -> list[Tensor]:
        """By layer, the first row of each primary: int64 [primaries], ascending."""
        primaries = range(self.owners * self.replicas)
        return [
            torch.tensor([self.mastered(index, p)[0] for p in primaries])
            for index in range(len(self.rows))
        ]

    @cached_property
    def to_owner(self) -> list[Tensor]:
        """By layer, what turns a row id into its number at its owner: int64 [primaries]."""
        owners = [
            _offsets(self.owned(index, owner) for index in range(len(self.rows)))
            for owner in range(self.owners)
        ]
        every = [owners[p // self.replicas] for p in range(self.owners * self.replicas)]
        return [torch.tensor([own[index] for own in every]) for index in range(len(self.rows))]

    @cached_property
    def to_primary(self) -> list[Tensor]:
        """By layer, what turns a row id into its number at its primary: int64 [primaries]."""
        every = [
            _offsets(self.mastered(index, p) for index in range(len(self.rows)))
            for p in range(self.owners * self.replicas)
        ]
        return [torch.tensor([own[index] for own in every]) for index in range(len(self.rows))]


def _total(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(high - low for low, high in ranges)


def _offsets(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """What turns a row into its number where these ranges are counted one after another."""
    found, before = [], 0
    for low, high in ranges:
        found.append(before - low)
        before += high - low
    return found
