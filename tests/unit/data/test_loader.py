"""Batches: the same whatever the ranks, micro-batches and workers; workers outlive signals."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import loader
from data.batch import Batch
from data.corpus import PackedSet
from data.loader import batches, eval_batches
from data.order import pack_indices
from data.packing import plan_packs

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def packs(hasher, random_documents) -> PackedSet:
    tokens, offsets = random_documents(
        np.random.default_rng(2).integers(3, 40, 30).tolist(), seed=3
    )
    plan = plan_packs(offsets, np.arange(30), pack_length=32, alignment=4)
    return PackedSet(tokens, plan, 32, 2, hasher)


def run(packs, **changes) -> list[list[Batch]]:
    given: dict[str, Any] = {
        "seed": 1,
        "first_step": 0,
        "steps": 3,
        "packs_per_step": 4,
        "packs_per_micro_batch": 1,
        "rank": 0,
        "ranks": 1,
        "workers": 0,
    }
    return list(batches(packs, **(given | changes)))


FIELDS = ("input_ids", "labels", "position_ids", "seq_ids", "token_types", "engram_rows")


def rows(batch_lists: list[list[Batch]]) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """(sample id, the row's tensors) of every row, in order."""
    return [
        (sample, {name: getattr(batch, name)[row] for name in FIELDS})
        for step in batch_lists
        for batch in step
        for row, sample in enumerate(batch.sample_ids)
    ]


def assert_same(one, two):
    assert [sample for sample, _ in one] == [sample for sample, _ in two]
    for (_, a), (_, b) in zip(one, two, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in FIELDS)


@settings(deadline=None, max_examples=30)
@given(
    ranks=st.integers(1, 3),
    size=st.integers(1, 2),
    each=st.integers(1, 2),
    first=st.integers(0, 30),
    seed=st.integers(0, 100),
)
def test_samples_do_not_depend_on_ranks_or_micro_batches(packs, ranks, size, each, first, seed):
    total = ranks * size * each
    whole = run(packs, packs_per_step=total, first_step=first, steps=2, seed=seed)
    share = [
        run(
            packs,
            packs_per_step=total,
            packs_per_micro_batch=size,
            first_step=first,
            steps=2,
            seed=seed,
            rank=rank,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    assert all(len(step) == each for part in share for step in part)
    dealt = [row for step in range(2) for part in share for row in rows([part[step]])]
    assert_same(rows(whole), dealt)
    assert [sample for sample, _ in dealt] == list(range(first * total, (first + 2) * total))


def test_samples_are_the_packs_of_the_order(packs):
    found = rows(run(packs, steps=12))
    order = pack_indices(np.arange(48), seed=1, packs=len(packs))
    assert len(packs) < 48
    alone = {
        index: rows(
            [list(eval_batches(packs, count=len(packs), packs_per_micro_batch=1, rank=0, ranks=1))]
        )[index][1]
        for index in set(order.tolist())
    }
    for (sample, row), index in zip(found, order.tolist(), strict=True):
        assert torch.equal(row["input_ids"], alone[index]["input_ids"]), sample


def test_three_resumes_see_the_same_samples(packs):
    parts = [run(packs, first_step=first, steps=2) for first in (0, 2, 4, 6)]
    assert_same(rows(run(packs, steps=8)), [row for part in parts for row in rows(part)])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_no_bit_and_no_random_state(packs, workers):
    here = run(packs, packs_per_micro_batch=2)
    state = torch.get_rng_state()
    there = run(packs, packs_per_micro_batch=2, workers=workers)
    assert torch.equal(state, torch.get_rng_state())
    assert [len(step) for step in there] == [2, 2, 2]
    assert_same(rows(here), rows(there))
    for one, two in zip(chain(*here), chain(*there), strict=True):
        assert torch.equal(one.layout.cu_seqlens, two.layout.cu_seqlens)
        assert torch.equal(one.layout.cu_seqlens_padded, two.layout.cu_seqlens_padded)
        assert one.layout.max_seqlen == two.layout.max_seqlen


def test_workers_outlive_the_signals_that_stop_a_run(packs):
    stream = batches(
        packs,
        seed=1,
        first_step=0,
        steps=40,
        packs_per_step=4,
        packs_per_micro_batch=1,
        rank=0,
        ranks=1,
        workers=2,
    )
    workers = multiprocessing.active_children()
    assert len(workers) == 2

    def hit() -> None:
        for worker in workers:
            for number in (signal.SIGTERM, signal.SIGINT):
                assert worker.pid is not None
                os.kill(worker.pid, number)

    hit()  # while they are still starting
    first = next(stream)
    hit()
    found = [first, *stream]
    assert_same(rows(found), rows(run(packs, steps=40)))
    assert_all_gone(workers)


def test_closing_the_iterator_ends_the_workers(packs):
    stream = batches(
        packs,
        seed=1,
        first_step=0,
        steps=1000,
        packs_per_step=4,
        packs_per_micro_batch=1,
        rank=0,
        ranks=1,
        workers=1,
    )
    workers = multiprocessing.active_children()
    next(stream)
    stream.close()
    assert_all_gone(workers)


def test_a_process_may_end_with_the_iterator_open(tmp_path):
    script = tmp_path / "leave.py"
    script.write_text(
        textwrap.dedent("""\
            import sys
            import numpy as np
            from data.corpus import PackedSet
            from data.loader import batches
            from data.packing import plan_packs

            if __name__ == "__main__":
                plan = plan_packs(
                    np.array([0, 90]), np.array([0]), pack_length=32, alignment=4
                )
                packs = PackedSet(np.arange(90, dtype=np.int32), plan, 32, 2, None)
                stream = batches(
                    packs, seed=1, first_step=0, steps=1000, packs_per_step=1,
                    packs_per_micro_batch=1, rank=0, ranks=1, workers=1,
                )
                next(stream)
                sys.exit(3)
            """),
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (3, "")


def assert_all_gone(workers) -> None:
    deadline = time.monotonic() + 20
    while any(worker.is_alive() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_during_the_start_of_workers_reaches_us(packs, monkeypatch):
    seen = []
    while_starting = []

    class Loader:
        def __init__(self, *_, **__):
            pass

        def __iter__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            while_starting.append(signal.pthread_sigmask(signal.SIG_BLOCK, set()))
            return iter(())

    monkeypatch.setattr(loader, "DataLoader", Loader)
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        run(packs, workers=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert while_starting[0] >= {signal.SIGTERM, signal.SIGINT}
    assert seen == [True]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


@pytest.mark.parametrize(("count", "ranks", "size"), [(5, 2, 2), (1, 3, 1), (99, 4, 3), (4, 2, 2)])
def test_ranks_evaluate_each_pack_once_in_equally_many_batches(packs, count, ranks, size):
    parts = [
        list(eval_batches(packs, count=count, packs_per_micro_batch=size, rank=r, ranks=ranks))
        for r in range(ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    assert all(batch.input_ids.shape == (size, 32) for part in parts for batch in part)
    found = rows(parts)
    real = [sample for sample, _ in found if sample >= 0]
    assert real == list(range(min(count, len(packs))))
    for sample, row in found:
        assert (sample == -1) == bool((row["seq_ids"] == 0).all())
        assert sample >= 0 or bool((row["labels"] == -100).all())


def test_nothing_to_evaluate_or_train_on_is_named(packs):
    empty = PackedSet(
        packs.tokens,
        plan_packs(np.array([0]), np.array([], dtype=np.int64), pack_length=32, alignment=4),
        32,
        2,
        packs.hasher,
    )
    with pytest.raises(ValueError, match=r"raise data\.holdout"):
        eval_batches(empty, count=4, packs_per_micro_batch=1, rank=0, ranks=1)
    with pytest.raises(ValueError, match="no pack to train on"):
        run(empty)


def test_an_uneven_step_is_refused_before_the_first_batch(packs):
    with pytest.raises(ValueError, match="packs_per_step=4"):
        batches(
            packs,
            seed=1,
            first_step=0,
            steps=1,
            packs_per_step=4,
            packs_per_micro_batch=1,
            rank=0,
            ranks=3,
            workers=0,
        )
