"""Batches for one rank, prepared here or in worker processes: the same bits either way."""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.batch import PADDING_PACK, Batch, collate
from data.corpus import PackedSet
from data.order import pack_indices, rank_indices, sharing_problems

STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def batches(
    packs: PackedSet,
    *,
    seed: int,
    first_step: int,
    steps: int,
    packs_per_step: int,
    packs_per_micro_batch: int,
    rank: int,
    ranks: int,
    workers: int,
) -> Generator[list[Batch], None, None]:
    """One list of micro-batches for each of `steps` steps from first_step on, for one rank.

    Step t takes global pack indices [t * packs_per_step, (t + 1) * packs_per_step), each rank a
    contiguous slice. `workers` > 0 prepares batches ahead in that many processes, started at
    once; they are stopped when the iterator is closed or dropped. ValueError when there is no
    pack or a step cannot be dealt out evenly.
    """
    if not len(packs):
        raise ValueError("there is no pack to train on; correct data.paths or lower data.holdout")
    if found := sharing_problems(
        packs_per_step=packs_per_step, packs_per_micro_batch=packs_per_micro_batch, ranks=ranks
    ):
        raise ValueError("\n".join(found))
    micro_batches = packs_per_step // ranks // packs_per_micro_batch
    source = _MicroBatches(
        packs, seed, first_step, steps, packs_per_step, packs_per_micro_batch, rank, ranks
    )
    if not workers or not steps:
        return _by_step(source, micro_batches)
    stream = _by_step(_in_workers(source, workers), micro_batches)
    # A process that ends with the stream open would wait for its workers for ever: the exit
    # handler of multiprocessing stops them by SIGTERM, which they ignore. Ours runs before it.
    atexit.register(_close, weakref.ref(stream))
    return stream


def eval_batches(
    packs: PackedSet, *, count: int, packs_per_micro_batch: int, rank: int, ranks: int
) -> Iterator[Batch]:
    """This rank's part of the first `count` packs (all, if there are fewer), in order.

    Every rank yields the same number of batches of packs_per_micro_batch rows; rows that are
    missing for that are padding, without labels. ValueError when there is no pack.
    """
    if not len(packs):
        raise ValueError(
            "no document is held out to evaluate on; raise data.holdout, give more than one "
            "document, or set eval.every=0"
        )
    wanted = min(count, len(packs))
    size = packs_per_micro_batch
    share = -(-wanted // (ranks * size)) * size
    mine = np.arange(rank * share, (rank + 1) * share)
    mine[mine >= wanted] = PADDING_PACK
    return (
        collate(packs, rows, sample_ids=tuple(rows.tolist()))
        for rows in np.split(mine, share // size)
    )


@dataclass(frozen=True)
class _MicroBatches(Dataset):
    """Micro-batches of one rank by number, over all steps; what the workers hold."""

    packs: PackedSet
    seed: int
    first_step: int
    steps: int
    packs_per_step: int
    packs_per_micro_batch: int
    rank: int
    ranks: int

    def __len__(self) -> int:
        return self.steps * (self.packs_per_step // self.ranks // self.packs_per_micro_batch)

    def __getitem__(self, number: int) -> Batch:
        size = self.packs_per_micro_batch
        step, within = divmod(number, self.packs_per_step // self.ranks // size)
        mine = rank_indices(
            self.first_step + step,
            packs_per_step=self.packs_per_step,
            rank=self.rank,
            ranks=self.ranks,
        )[within * size : (within + 1) * size]
        chosen = pack_indices(mine, seed=self.seed, packs=len(self.packs))
        return collate(self.packs, chosen, sample_ids=tuple(mine.tolist()))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


def _by_step(stream: Iterable[Batch], micro_batches: int) -> Generator[list[Batch], None, None]:
    step: list[Batch] = []
    for batch in stream:
        step.append(batch)
        if len(step) == micro_batches:
            yield step
            step = []


def _in_workers(source: _MicroBatches, workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        source,
        batch_size=None,
        collate_fn=_as_is,
        num_workers=min(workers, len(source)),
        multiprocessing_context="spawn",
        worker_init_fn=_set_up_worker,
        generator=torch.Generator(),  # its own: the trainer's random state stays untouched
    )
    # A signal that stops a run goes to the whole process group. The workers must survive it, from
    # their first instruction on, or the last checkpoint is lost with them: they inherit the
    # blocked mask, and our own pending signals arrive when it is lifted. The tracker first,
    # because starting it unblocks these signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close(stream: weakref.ref[Generator]) -> None:
    if (living := stream()) is not None:
        living.close()


def _as_is(batch: Any) -> Any:
    return batch


def _set_up_worker(worker: int) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A worker told to end within a second of its start often aborts in the destructors of torch's
    # libraries, and its parent reports a crash. Its work is done by then: leave without them.
    atexit.register(os._exit, 0)
