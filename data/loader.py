"""Batches for one rank, prepared here or in worker processes: the same bits either way."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

from data.batch import WHOLE, Batch, Stretch
from data.collate import collate
from data.order import rank_indices, sharing_problems
from data.packs import PackedSet
from data.workers import in_workers

PADDING_SAMPLE = -1


def batches(
    packs: PackedSet,
    *,
    first_step: int,
    steps: int,
    packs_per_step: int,
    packs_per_micro_batch: int,
    rank: int,
    ranks: int,
    workers: int,
    pin: bool = False,
    stretch: Stretch = WHOLE,
) -> Generator[list[Batch], None, None]:
    """One list of micro-batches for each of `steps` steps from first_step on, for one rank.

    Step t takes global pack indices [t * packs_per_step, (t + 1) * packs_per_step), each rank a
    contiguous slice. With context groups `rank` counts groups: a group's ranks take the same packs,
    and of them each its `stretch` of columns. `workers` > 0 prepares batches ahead in that many
    processes, started at once; they are stopped when the iterator is closed or dropped. pin: into
    page-locked memory.

    ValueError when there are no such packs or a step cannot be dealt out evenly. The iterator
    raises DataError for what cannot be used, WorkerDiedError when a worker dies.
    """
    found = packs.problems((first_step + steps) * packs_per_step)
    found += sharing_problems(
        packs_per_step=packs_per_step, packs_per_micro_batch=packs_per_micro_batch, ranks=ranks
    )
    if found:
        raise ValueError("\n".join(found))
    micro_batches = packs_per_step // ranks // packs_per_micro_batch
    source = MicroBatches(
        packs, first_step, steps, packs_per_step, packs_per_micro_batch, rank, ranks, stretch
    )
    if not workers or not steps:
        here = (source[number] for number in range(len(source)))
        return _by_step((batch.pin_memory() for batch in here) if pin else here, micro_batches)
    return _by_step(in_workers(source, workers, pin=pin), micro_batches)


def eval_batches(
    packs: PackedSet,
    *,
    count: int,
    packs_per_micro_batch: int,
    rank: int,
    ranks: int,
    stretch: Stretch = WHOLE,
) -> Iterator[Batch]:
    """This rank's part of the first `count` held-out packs (all, if there are fewer), in order.

    Every rank yields the same number of batches of packs_per_micro_batch rows; rows that are
    missing for that are padding, without labels. stretch: as in `batches`. ValueError when there is
    no pack.
    """
    wanted = packs.available(count)
    if not wanted:
        raise ValueError(
            "no document is held out to evaluate on; raise data.holdout, give more than one "
            "document, or set eval.every=0"
        )
    size = packs_per_micro_batch
    share = -(-wanted // (ranks * size)) * size
    mine = np.arange(rank * share, (rank + 1) * share)
    mine[mine >= wanted] = PADDING_SAMPLE
    return (
        collate(
            packs,
            [None if index == PADDING_SAMPLE else packs.place(index) for index in rows],
            sample_ids=tuple(rows),
            stretch=stretch,
        )
        for rows in mine.reshape(-1, size).tolist()
    )


@dataclass(frozen=True)
class MicroBatches(Dataset):
    """Micro-batches of one rank by number, over all steps; what the workers hold."""

    packs: PackedSet
    first_step: int
    steps: int
    packs_per_step: int
    packs_per_micro_batch: int
    rank: int
    ranks: int
    stretch: Stretch = WHOLE

    def __len__(self) -> int:
        return self.steps * (self.packs_per_step // self.ranks // self.packs_per_micro_batch)

    def __getitem__(self, number: int) -> Batch:
        samples = self.samples(number)
        places = [self.packs.place(index) for index in samples]
        self.packs.plan_ahead(samples[-1])
        return collate(self.packs, places, sample_ids=tuple(samples), stretch=self.stretch)

    def samples(self, number: int) -> list[int]:
        """Global pack indices of a micro-batch."""
        size = self.packs_per_micro_batch
        step, within = divmod(number, self.packs_per_step // self.ranks // size)
        mine = rank_indices(
            self.first_step + step,
            packs_per_step=self.packs_per_step,
            rank=self.rank,
            ranks=self.ranks,
        )
        return mine[within * size : (within + 1) * size].tolist()

    def describe(self, number: int) -> str:
        """What a micro-batch is made of, in words."""
        return ", ".join(self.packs.describe(index) for index in self.samples(number))


def _by_step(stream: Iterable[Batch], micro_batches: int) -> Generator[list[Batch], None, None]:
    step: list[Batch] = []
    for batch in stream:
        step.append(batch)
        if len(step) == micro_batches:
            yield step
            step = []
