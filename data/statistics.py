"""What a run's packs are like, counted: lengths, packing, labels, Engram look-ups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.collate import collate
from data.packs import PackedSet, PackSource, Place

MOST_NAMED = 10
MOST_TOKENS = 2**18  # looked at for Engram; their rows take 384 bytes each at the released sizes


@dataclass(frozen=True, eq=False)
class SourceStatistics:
    """One source. lengths: documents by the number of bits of their length, [b]: 2^(b-1) and
    more tokens, below 2^b. dropped: documents left out because they are longer than a pack.
    dropped_first: where the first of them are from. cuts: how often a document was cut since it is
    longer than a pack.

    packs, held_out: packs of either kind. slots: positions behind documents that the alignment
    leaves empty; padding counts these and all other positions without a token. labels: positions
    with something to learn.
    """

    name: str
    documents: int
    dropped: int
    dropped_first: tuple[str, ...]
    cuts: int
    images: int
    tokens: int
    lengths: np.ndarray
    longest: int
    packs: int
    held_out: int
    positions: int
    padding: int
    slots: int
    labels: int

    @classmethod
    def of(cls, source: PackSource) -> SourceStatistics:
        """Count the windows that are there; plans those that nobody has planned yet."""
        counts = dict.fromkeys(
            ("documents", "dropped", "cuts", "images", "tokens", "packs", "held_out"), 0
        ) | {"slots": 0, "labels": 0}
        prepared, settings = source.plans.prepared, source.plans.settings
        lengths, longest = np.zeros(32, dtype=np.int64), 0
        named: list[str] = []
        for window in range(prepared.windows):
            here, plan = prepared.lengths(window), source.plans.plan(window)
            lengths += np.bincount(_bits(here), minlength=32)
            longest = max(longest, int(here.max(initial=0)))
            counts["documents"] += len(here)
            counts["dropped"] += len(plan.dropped)
            counts["cuts"] += len(plan.starts) - (len(here) - len(plan.dropped))
            few = np.sort(plan.dropped)[: MOST_NAMED - len(named)].tolist()
            named += [prepared.origin(window, document) for document in few]
            counts["images"] += len(plan.image_starts)
            counts["tokens"] += int(plan.lengths.sum())
            counts["packs"] += plan.training
            counts["held_out"] += len(plan) - plan.training
            counts["slots"] += int((-plan.lengths % settings.alignment).sum())
            mask = prepared.labelled(window)
            if mask is None:
                counts["labels"] += int((plan.lengths - 1).sum())
            else:
                counts["labels"] += _true_within(mask, plan.starts + 1, plan.lengths - 1)
        positions = (counts["packs"] + counts["held_out"]) * settings.pack_length
        return cls(
            name=source.name,
            lengths=lengths,
            longest=longest,
            dropped_first=tuple(named),
            positions=positions,
            padding=positions - counts["tokens"],
            **counts,
        )


@dataclass(frozen=True)
class EngramReuse:
    """Look-ups of the first steps in one Engram layer.

    looked_up: rows that `tokens` tokens ask for, each counted as often; distinct: different ones.
    per_step: different rows in a step, on average. top: (n, share of the look-ups that the n most
    wanted rows take). rows: in the table.
    """

    layer: int
    rows: int
    tokens: int
    looked_up: int
    distinct: int
    per_step: float
    top: tuple[tuple[int, float], ...]


def engram_reuse(packs: PackedSet, *, packs_per_step: int, steps: int) -> list[EngramReuse]:
    """Of the first steps, or as many as hold MOST_TOKENS tokens but at least a pack, by layer."""
    if packs.hasher is None:
        return []
    by_step: list[np.ndarray] = []
    seen = 0
    for step in range(steps):
        if seen and seen + packs_per_step * packs.pack_length > MOST_TOKENS:
            break
        parts: list[np.ndarray] = []
        for index in range(step * packs_per_step, (step + 1) * packs_per_step):
            if seen and seen + packs.pack_length > MOST_TOKENS:
                break
            batch = collate(packs, [packs.place(index)], sample_ids=(index,))
            text = (batch.seq_ids > 0) & (batch.token_types < 0)
            parts.append(batch.engram_rows[text].numpy())
            seen += packs.pack_length
        by_step.append(np.concatenate(parts))
    geometry = packs.hasher.geometry
    return [
        _reuse([rows[:, number] for rows in by_step], layer, geometry.rows_per_layer[number])
        for number, layer in enumerate(geometry.layer_ids)
    ]


def _reuse(steps: list[np.ndarray], layer: int, rows: int) -> EngramReuse:
    counts = np.sort(np.unique(np.concatenate(steps), return_counts=True)[1])[::-1]
    total = int(counts.sum())
    sizes = [10**power for power in range(2, 8) if 10**power <= len(counts)]
    return EngramReuse(
        layer=layer,
        rows=rows,
        tokens=sum(len(step) for step in steps),
        looked_up=total,
        distinct=len(counts),
        per_step=float(np.mean([len(np.unique(step)) for step in steps])),
        top=tuple((size, int(counts[:size].sum()) / total) for size in sizes),
    )


@dataclass(frozen=True, eq=False)
class Stretch:
    """A document, or a piece of one, as it stands in a pack. where: its origin; column: of its
    first token; learnt: bool, which tokens are labels."""

    where: str
    column: int
    tokens: np.ndarray
    learnt: np.ndarray


def stretches(packs: PackedSet, place: Place) -> list[Stretch]:
    """The documents of a pack, in row order."""
    prepared, mask = packs.prepared(place), packs.labelled(place)
    offsets, tokens = prepared.offsets(place.window), packs.tokens(place)
    found = []
    for start, length, column in zip(*(a.tolist() for a in packs.pieces(place)), strict=True):
        here = slice(start, start + length)
        learnt = np.ones(length, dtype=bool) if mask is None else np.array(mask[here])
        learnt[0] = False  # nothing stands before it that could predict it
        document = int(np.searchsorted(offsets, start, side="right")) - 1
        where = prepared.origin(place.window, document)
        if start > offsets[document]:
            where += f", from its token {start - int(offsets[document]):,} on"
        found.append(Stretch(where, column, tokens[here], learnt))
    return found


def _true_within(mask: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> int:
    """How many are true in all stretches together; reads a few megabytes at a time."""
    order, found = np.argsort(starts), 0
    for first in range(0, len(order), 4096):
        some = order[first : first + 4096]
        begin, end = int(starts[some[0]]), int((starts[some] + lengths[some]).max())
        before = np.append(0, np.cumsum(mask[begin:end], dtype=np.int64))
        at = starts[some] - begin
        found += int((before[at + lengths[some]] - before[at]).sum())
    return found


def _bits(lengths: np.ndarray) -> np.ndarray:
    """How many binary digits each number has."""
    return np.frexp(lengths.astype(np.float64))[1]
