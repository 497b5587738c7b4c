"""The distinct rows that micro-batches read, and how the micro-batches are cut into windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
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
    def of(cls, batches: Sequence[Tensor]) -> Distinct:
        """Of micro-batches [B, S, layers, columns] int64 on the host."""
        ids, inverses = [], [[] for _ in batches]
        for index in range(batches[0].shape[2]):
            parts = [batch[:, :, index] for batch in batches]
            every = torch.cat([part.flatten() for part in parts])
            own, inverse = torch.unique(every, return_inverse=True)
            ids.append(own)
            pieces = inverse.split([part.numel() for part in parts])
            for found, part, piece in zip(inverses, parts, pieces, strict=True):
                found.append(piece.view(part.shape))
        return cls(ids, inverses)

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
    batches: Sequence[Tensor],
    *,
    layers: Sequence[int],
    counts: Sequence[int],
    most: int | None,
    world: Group,
) -> list[Distinct]:
    """Windows of consecutive micro-batches with at most `most` distinct rows on any rank of
    `world`, but at least one micro-batch; as many windows on every rank. None = one window, and
    the ranks may have different numbers of micro-batches.

    batches: [B, S, layers, columns] int64 on the host. ValueError, the same on all ranks at once,
    names rows outside their table on any of them: a wrong id would read another row in silence.
    """
    sizes = [] if most is None else [batch.numel() for batch in batches]
    if most is None or sum(sizes) <= most:  # no row need be looked at twice
        parts = [Distinct.of(batches)]
    else:
        parts = [Distinct.of([batch]) for batch in batches]
        sizes = [part.size for part in parts]
    ends = [end for index in range(len(layers)) for end in _ends(parts, index)]
    facts = torch.tensor(sizes + ends, dtype=torch.int64)
    if world.size > 1:
        dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=world.process_group)
    agreed = facts.tolist()
    sizes, ends = agreed[: len(sizes)], agreed[len(sizes) :]
    for layer, count, high, low in zip(layers, counts, ends[::2], ends[1::2], strict=True):
        if high >= count or -low < 0:
            raise ValueError(
                f"Engram row ids of layer {layer} reach from {-low} to {high}, outside its {count} "
                "rows: the batch was hashed for another geometry"
            )
    cuts = [slice(None)] if most is None else _cuts(sizes, most=most)
    if len(parts) == len(batches):
        return [merged(parts[cut]) for cut in cuts]
    # Other ranks may need smaller windows than this one.
    return parts if len(cuts) == 1 else [Distinct.of(batches[cut]) for cut in cuts]


def _ends(parts: Sequence[Distinct], index: int) -> tuple[int, int]:
    """The highest row of a layer, and minus the lowest."""
    read = [part.ids[index] for part in parts if len(part.ids[index])]
    low = min((int(ids[0]) for ids in read), default=0)
    return max((int(ids[-1]) for ids in read), default=-1), -low


def _cuts(sizes: Sequence[int], *, most: int) -> list[slice]:
    cuts, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        if number > first and held + size > most:
            cuts.append(slice(first, number))
            first, held = number, 0
        held += size
    return [*cuts, slice(first, len(sizes))]
