"""Batches: the same whatever the ranks, micro-batches and workers; workers outlive signals."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Generator
from itertools import chain
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import workers as data_workers
from data.batch import Batch
from data.cache.prepared import PreparedSet
from data.collate import collate
from data.errors import DataError, WorkerDiedError
from data.loader import batches, eval_batches
from data.packs import PackedSet
from tests.ranks import POOL_NAME

ROOT = Path(__file__).parents[3]


def loader_workers() -> list[BaseProcess]:
    """The loader's processes, without those of tests/ranks.py, which may live beside them."""
    return [p for p in multiprocessing.active_children() if not p.name.startswith(POOL_NAME)]


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, write_set, random_documents) -> PreparedSet:
    """Three windows."""
    lengths = np.random.default_rng(2).integers(3, 40, 30).tolist()
    documents = random_documents(lengths, seed=3)
    return write_set(tmp_path_factory.mktemp("three"), documents, window_documents=12)


@pytest.fixture(scope="session")
def packs(make_packs, prepared) -> PackedSet:
    return make_packs(prepared)


@pytest.fixture(scope="session")
def held_out(make_packs, prepared) -> PackedSet:
    return make_packs(prepared, holdout=0.5, held_out=True)


def open_stream(packs, **changes) -> Generator[list[Batch], None, None]:
    given: dict[str, Any] = {
        "first_step": 0,
        "steps": 3,
        "packs_per_step": 4,
        "packs_per_micro_batch": 1,
        "rank": 0,
        "ranks": 1,
        "workers": 0,
    }
    return batches(packs, **(given | changes))


def run(packs, **changes) -> list[list[Batch]]:
    return list(open_stream(packs, **changes))


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


@settings(deadline=None, max_examples=20)
@given(
    ranks=st.integers(1, 3),
    size=st.integers(1, 2),
    each=st.integers(1, 2),
    first=st.integers(0, 30),
)
def test_samples_do_not_depend_on_ranks_or_micro_batches(packs, ranks, size, each, first):
    total = ranks * size * each
    given: dict[str, Any] = {"packs_per_step": total, "first_step": first, "steps": 2}
    whole = run(packs, **given)
    share = [
        run(packs, **given, packs_per_micro_batch=size, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    assert all(len(step) == each for part in share for step in part)
    dealt = [row for step in range(2) for part in share for row in rows([part[step]])]
    assert_same(rows(whole), dealt)
    assert [sample for sample, _ in dealt] == list(range(first * total, (first + 2) * total))


def test_samples_are_the_packs_of_the_order(packs):
    for sample, row in rows(run(packs, steps=12)):
        alone = collate(packs, [packs.place(sample)], sample_ids=(sample,))
        assert torch.equal(row["input_ids"], alone.input_ids[0]), sample


@settings(deadline=None, max_examples=12)
@given(
    worlds=st.lists(st.sampled_from([1, 2, 3]), min_size=4, max_size=4),
    kills=st.lists(st.integers(0, 12), min_size=3, max_size=3).map(sorted),
    lost=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_kills_and_resumes_on_any_number_of_ranks_consume_what_one_run_does(
    packs, worlds, kills, lost
):
    """Each attempt starts at the last checkpoint and goes some steps past the next; those steps
    are lost with it. What counts is what led to the checkpoints."""
    expected = rows(run(packs, steps=14, packs_per_step=6))
    consumed, done = [], 0
    for world, end, past in zip(worlds, [*kills, 14], [*lost, 0], strict=True):
        parts = [
            batches(
                packs,
                first_step=done,
                steps=14 - done,
                packs_per_step=6,
                packs_per_micro_batch=1,
                rank=rank,
                ranks=world,
                workers=0,
            )
            for rank in range(world)
        ]
        for step in range(done, min(14, end + past)):
            found = [row for part in parts for row in rows([next(part)])]
            if step < end:
                consumed += found
        done = end
    assert_same(expected, consumed)


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
    stream = open_stream(packs, steps=40, workers=2)
    workers = loader_workers()
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
    stream = open_stream(packs, steps=1000, workers=1)
    workers = loader_workers()
    next(stream)
    stream.close()
    assert_all_gone(workers)


def test_a_process_may_end_with_the_iterator_open(tmp_path, packs):
    script = tmp_path / "leave.py"
    script.write_text(
        textwrap.dedent("""\
            import pickle
            import sys
            from data.loader import batches

            if __name__ == "__main__":
                packs = pickle.loads(bytes.fromhex(sys.argv[1]))
                stream = batches(
                    packs, first_step=0, steps=1000, packs_per_step=1,
                    packs_per_micro_batch=1, rank=0, ranks=1, workers=1,
                )
                next(stream)
                sys.exit(3)
            """),
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, str(script), pickle.dumps(packs).hex()],
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

    monkeypatch.setattr(data_workers, "DataLoader", Loader)
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        run(packs, workers=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert while_starting[0] >= {signal.SIGTERM, signal.SIGINT}
    assert seen == [True]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_a_killed_worker_is_named_with_its_window_within_seconds(packs):
    stream = open_stream(packs, steps=1000, workers=2)
    next(stream)
    victim = loader_workers()[0]
    workers = loader_workers()
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerDiedError) as died:
        for _ in stream:
            pass
    assert time.monotonic() - begin < 5
    message = str(died.value)
    assert f"pid {victim.pid}) ended by signal SIGKILL while it prepared pack" in message
    assert "window" in message and "of data.s0 (" in message
    assert "lower data.workers" in message
    assert_all_gone(workers)


def test_a_worker_killed_while_we_wait_for_it_is_noticed(
    make_packs, tmp_path, write_set, random_documents, writing
):
    """It waits for a window that never comes, and so do we."""
    growing = write_set(
        tmp_path / "set", random_documents([30] * 12), window_documents=10, complete=False
    )
    stream = open_stream(make_packs(growing, streaming=True), steps=1000, workers=1)
    next(stream)
    next(stream)
    [worker] = loader_workers()
    killed = []

    def kill() -> None:
        time.sleep(1)
        killed.append(time.monotonic())
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerDiedError, match=r"window 1 of data\.s0"):
        next(stream)
    assert time.monotonic() - killed[0] < 5
    thread.join()


def test_a_worker_that_dies_while_we_are_busy_disturbs_nothing(packs):
    """Torch's own handler would raise here, in the middle of a checkpoint perhaps."""
    before = signal.getsignal(signal.SIGCHLD)
    stream = open_stream(packs, steps=1000, workers=1)
    next(stream)
    assert signal.getsignal(signal.SIGCHLD) == before
    [worker] = loader_workers()
    worker.kill()
    worker.join()
    time.sleep(0.2)
    with pytest.raises(WorkerDiedError):
        next(stream)
    assert signal.getsignal(signal.SIGCHLD) == before


def test_bad_data_in_a_worker_reads_as_it_would_here(make_packs, random_documents):
    packs = make_packs(random_documents([30] * 3), streaming=True, epochs=1)
    told = []
    for workers in (0, 1):
        with pytest.raises(DataError) as refused:
            run(packs, workers=workers, steps=5)
        told.append(str(refused.value))
    assert told[0] == told[1]
    assert "is used up" in told[0]


@pytest.mark.parametrize(("count", "ranks", "size"), [(5, 2, 2), (1, 3, 1), (99, 4, 3), (4, 2, 2)])
def test_ranks_evaluate_each_pack_once_in_equally_many_batches(held_out, count, ranks, size):
    parts = [
        list(eval_batches(held_out, count=count, packs_per_micro_batch=size, rank=r, ranks=ranks))
        for r in range(ranks)
    ]
    assert len({len(part) for part in parts}) == 1
    assert all(batch.input_ids.shape == (size, 32) for part in parts for batch in part)
    found = rows(parts)
    real = [sample for sample, _ in found if sample >= 0]
    assert real == list(range(held_out.available(count)))
    for sample, row in found:
        assert (sample == -1) == bool((row["seq_ids"] == 0).all())
        assert sample >= 0 or bool((row["labels"] == -100).all())


def test_nothing_to_evaluate_or_train_on_is_named(make_packs, random_documents):
    empty = make_packs(random_documents([90]), on_long_document="drop")
    with pytest.raises(ValueError, match=r"data\.s0 has no document to train on"):
        run(empty)
    none = make_packs(random_documents([9]), held_out=True)
    with pytest.raises(ValueError, match=r"raise data\.holdout"):
        eval_batches(none, count=4, packs_per_micro_batch=1, rank=0, ranks=1)


def test_an_uneven_step_is_refused_before_the_first_batch(packs):
    with pytest.raises(ValueError, match="packs_per_step=4"):
        open_stream(packs, ranks=3)
