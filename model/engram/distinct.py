"""The distinct rows that micro-batches read, and how the micro-batches are cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.parallel.group import Group


@dataclass(frozen=True)
class Distinct:
    """Distinct rows of some micro-batches.

    ids: by layer [U] int64, ascending. inverses: by micro-batch and layer [B, S, columns] int64,
    the place in ids of what each position reads.
    """

    ids: list[Tensor]
    inverses: list[list[Tensor]]

    @classmethod
    def of(cls, rows: Tensor) -> Distinct:
        """Of one micro-batch, [B, S, layers, columns] int64 on the host."""
        found = [
            torch.unique(rows[:, :, index], return_inverse=True) for index in range(rows.shape[2])
        ]
        return cls([ids for ids, _ in found], [[inverse for _, inverse in found]])

    @property
    def size(self) -> int:
        return sum(len(ids) for ids in self.ids)

    @property
    def reads(self) -> int:
        return sum(part.numel() for parts in self.inverses for part in parts)


def merged(parts: Sequence[Distinct]) -> Distinct:
    """Of several parts together, their micro-batches in order."""
    if len(parts) == 1:
        return parts[0]
    every, places = [], []
    for index in range(len(parts[0].ids)):
        ids, inverse = torch.unique(
            torch.cat([part.ids[index] for part in parts]), return_inverse=True
        )
        every.append(ids)
        places.append(inverse.split([len(part.ids[index]) for part in parts]))
    inverses = [
        [place[number][own] for place, own in zip(places, batch, strict=True)]
        for number, part in enumerate(parts)
        for batch in part.inverses
    ]
    return Distinct(every, inverses)


def agreed_windows(
    parts: Sequence[Distinct],
    *,
    layers: Sequence[int],
    counts: Sequence[int],
    most: int | None,
    world: Group,
) -> list[Distinct]:
    """Windows of consecutive micro-batches with at most `most` distinct rows on any rank of
    `world`, but at least one micro-batch; as many windows on every rank. None = one window, and
    the ranks may have different numbers of micro-batches.

    ValueError, the same on all ranks at once, names rows outside their table on any of them: a
    wrong id would read another row in silence.
    """
    facts = [] if most is None else [part.size for part in parts]
    sizes = len(facts)
    for index in range(len(layers)):
        own = [part.ids[index] for part in parts if len(part.ids[index])]
        facts.append(max((int(ids[-1]) for ids in own), default=-1))
        facts.append(-min((int(ids[0]) for ids in own), default=0))
    found = torch.tensor(facts, dtype=torch.int64)
    if world.size > 1:
        torch.distributed.all_reduce(
            found, op=torch.distributed.ReduceOp.MAX, group=world.process_group
        )
    facts = found.tolist()
    ends = facts[sizes:]
    for layer, count, high, low in zip(layers, counts, ends[::2], ends[1::2], strict=True):
        if high >= count or -low < 0:
            raise ValueError(
                f"Engram row ids of layer {layer} reach from {-low} to {high}, outside its {count} "
                "rows: the batch was hashed for another geometry"
            )
    if most is None:
        return [merged(parts)]
    return [merged(parts[cut]) for cut in _cuts(facts[:sizes], most=most)]


def _cuts(sizes: Sequence[int], *, most: int) -> list[slice]:
    cuts, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        if number > first and held + size > most:
            cuts.append(slice(first, number))
            first, held = number, 0
        held += size
    return [*cuts, slice(first, len(sizes))]
