"""Best-fit packing: documents into rows of one length, with as little padding as may be."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackPlan:
    """Which pieces of the flat token array each pack holds, and where in the row they stand.

    Pack p holds pieces pack_offsets[p]:pack_offsets[p + 1], in row order. Piece i is
    tokens[starts[i]:starts[i] + lengths[i]] and begins at columns[i], a multiple of the
    alignment. All arrays int64.
    """

    pack_offsets: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    columns: np.ndarray

    def __len__(self) -> int:
        return len(self.pack_offsets) - 1


def plan_packs(
    offsets: np.ndarray, documents: np.ndarray, *, pack_length: int, alignment: int
) -> PackPlan:
    """Pack the chosen `documents` (numbers into `offsets`) into rows of pack_length.

    A document longer than a row is cut into pieces of pack_length and a rest; each piece is a
    document of its own from here on. Every piece starts at a multiple of `alignment`; what it
    leaves of its last group is padding.
    """
    assert pack_length % alignment == 0, "validated with the configuration"
    starts, lengths = _cut(offsets, documents, pack_length)
    groups = -(-lengths // alignment)
    pack = best_fit(groups, capacity=pack_length // alignment)
    # Pieces of one pack side by side, the longest first.
    order = np.lexsort((np.arange(len(pack)), -groups, pack))
    counts = np.bincount(pack)
    pack_offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    widths = groups[order] * alignment
    ends = np.cumsum(widths)
    row_starts = np.concatenate(([0], ends))[pack_offsets[:-1]]
    columns = ends - widths - np.repeat(row_starts, counts)
    return PackPlan(pack_offsets, starts[order], lengths[order], columns)


def best_fit(sizes: np.ndarray, *, capacity: int) -> np.ndarray:
    """Decreasing best fit: the bin of every item, int64, bins numbered as they are opened.

    Items go from large to small (equal ones in their order) into the fullest bin that takes
    them. Deterministic; about a microsecond an item.
    """
    assert sizes.size == 0 or 0 < sizes.min() <= sizes.max() <= capacity
    bins = np.empty(len(sizes), dtype=np.int64)
    spaces: list[int] = []  # the distinct free spaces of open bins, ascending
    with_space: dict[int, list[int]] = {}
    opened = 0
    order = np.argsort(-sizes, kind="stable")
    for item, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        at = bisect_left(spaces, size)
        if at == len(spaces):
            chosen, free = opened, capacity
            opened += 1
        else:
            free = spaces[at]
            same = with_space[free]
            chosen = same.pop()
            if not same:
                del spaces[at]
        bins[item] = chosen
        if left := free - size:
            same = with_space.setdefault(left, [])
            if not same:
                insort(spaces, left)
            same.append(chosen)
    return bins


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0]+1, ... (counts[0] of them), then the same from starts[1], and so on."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _cut(
    offsets: np.ndarray, documents: np.ndarray, pack_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(starts, lengths) of the pieces, in document order."""
    first, end = offsets[documents], offsets[documents + 1]
    counts = -(-(end - first) // pack_length)
    number = ranges(np.zeros_like(counts), counts)
    starts = np.repeat(first, counts) + number * pack_length
    return starts, np.minimum(np.repeat(end, counts) - starts, pack_length)
