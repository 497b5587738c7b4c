"""Packs by global index: over sources, windows and epochs, in any process."""

import pickle
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache.encoded import Encoded
from data.cache.writer import SetWriter
from data.errors import DataError
from data.packs import PackedSet, Place


def packs_of(packs: PackedSet, source: int, *, held_out: bool = False) -> list[Place]:
    """All packs of a source, window by window."""
    plans, found = packs.sources[source].plans, []
    for window in range(plans.prepared.windows):
        plan = plans.plan(window)
        numbers = range(plan.training, len(plan)) if held_out else range(plan.training)
        found += [Place(source, window, pack) for pack in numbers]
    return found


def tokens_of(packs: PackedSet, place: Place) -> int:
    return int(packs.pieces(place)[1].sum())


LENGTHS = st.lists(st.integers(2, 70), min_size=1, max_size=30)


@settings(deadline=None, max_examples=25)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.integers(1, 9), st.integers(0, 50))
def test_every_token_comes_once_an_epoch(make_packs, random_documents, sources, window, seed):
    packs = make_packs(
        *(random_documents(lengths, seed=i) for i, lengths in enumerate(sources)),
        seed=seed,
        window_documents=window,
    )
    for number, lengths in enumerate(sources):
        every = packs_of(packs, number)
        places = (packs.place(i) for i in range(10**6))
        mine = (place for place in places if place.source == number)
        for _ in range(2):
            epoch = [next(mine) for _ in every]
            assert sorted(epoch) == sorted(every)
            assert sum(tokens_of(packs, place) for place in epoch) == sum(lengths)


def test_shares_of_a_mixture_follow_its_weights(make_packs, random_documents):
    packs = make_packs(random_documents([30] * 50), random_documents([30] * 3), weights=(1.0, 3.0))
    sources = [packs.place(i).source for i in range(1000, 2000)]
    assert abs(sources.count(0) - 250) <= 10


def test_held_out_packs_are_finite_and_take_turns(make_packs, random_documents):
    packs = make_packs(
        random_documents([30] * 100),
        random_documents([30] * 200),
        weights=(1.0, 1.0),
        holdout=0.1,
        held_out=True,
        window_documents=25,
    )
    every = packs_of(packs, 0, held_out=True) + packs_of(packs, 1, held_out=True)
    count = packs.available(10**6)
    assert count == len(every) > 20
    places = [packs.place(i) for i in range(count)]
    assert sorted(places) == sorted(every)
    first = [place.source for place in places[:10]]
    assert first.count(0) == first.count(1) == 5
    with pytest.raises(IndexError):
        packs.place(count)
    assert packs.available(3) == 3


def test_without_packs_nothing_is_available(make_packs, random_documents):
    packs = make_packs(random_documents([70, 90]), on_long_document="drop", window_documents=1)
    [problem] = packs.problems(1)
    assert "data.s0 has no document to train on" in problem
    held_out = make_packs(random_documents([9]), holdout=0.5, held_out=True)
    assert held_out.available(5) == 0


def test_epochs_of_a_source_are_limited_where_asked(make_packs, random_documents):
    packs = make_packs(random_documents([30] * 5), epochs=2)
    assert packs.place(9).source == 0
    with pytest.raises(DataError, match=r"data\.s0 is used up.*2 time.*data\.s0\.epochs"):
        packs.place(10)
    assert packs.problems(10) == []
    [problem] = packs.problems(11)
    assert "data.s0.epochs=2 allows 10 of its packs, but 11 packs of training need 11" in problem


def test_a_document_without_a_place_is_found_before_the_run(make_packs, random_documents):
    """Whatever the window it is in, which the run may come to after days."""
    packs = make_packs(
        random_documents([30] * 9 + [33]), on_long_document="refuse", window_documents=2
    )
    with pytest.raises(DataError, match="made-up:10: 33 tokens"):
        packs.sources[0].plan_beginning(seed=1, number=0)


def test_a_set_travels_as_paths(make_packs, random_documents):
    packs = make_packs(random_documents([30] * 3000), hasher=None)
    places = [packs.place(i) for i in range(0, 9000, 7)]
    packs.tokens(places[0])
    raw = pickle.dumps(packs)
    assert len(raw) < 2000
    there = pickle.loads(raw)
    assert [there.place(i) for i in range(0, 9000, 7)] == places


def test_the_next_window_is_planned_ahead(make_packs, random_documents):
    packs = make_packs(random_documents([30] * 40), window_documents=10)
    prepared = packs.sources[0].plans.prepared

    def planned() -> set[int]:
        return {w for w in range(4) if list(prepared.window_folder(w).glob("plan-*"))}

    first = packs.place(0).window
    assert planned() == {first}
    packs.plan_ahead(0)
    assert len(planned()) == 2
    packs.plan_ahead(0)
    assert len(planned()) == 2
    second = packs.place(10).window
    assert planned() == {first, second}


def test_a_streaming_source_is_used_from_its_first_window_on(
    make_packs, random_documents, tmp_path, capsys, monkeypatch, writing
):
    monkeypatch.setattr("data.packs.POLL_SECONDS", 0.01)
    monkeypatch.setattr("data.packs.SILENT_SECONDS", 0.05)
    documents = random_documents([30] * 25)
    header = {"fingerprint": "f" * 64, "settings": {}, "files": ["made-up"]}
    writer = SetWriter(tmp_path / "set", header=header, labelled=False, window_documents=10)

    def append(first, end):
        origins = [(0, i) for i in range(first, end)]
        writer.append(Encoded.of(documents[first:end], origins), position=end)

    append(0, 13)
    from data.cache.prepared import PreparedSet

    prepared = PreparedSet.open(tmp_path / "set")
    packs = make_packs(prepared, streaming=True, holdout=0.1)
    assert [packs.place(i).window for i in range(9)] == [0] * 9
    packs.plan_ahead(8)  # the next is not there: nothing to do

    def later():
        time.sleep(0.3)
        append(13, 25)
        writer.complete()

    thread = threading.Thread(target=later)
    thread.start()
    begin = time.monotonic()
    assert packs.place(9).window == 1
    assert time.monotonic() - begin > 0.2
    assert "Waiting for window 1 of data.s0" in capsys.readouterr().out
    thread.join()
    whole = [packs.place(i).window for i in range(24)]
    assert whole == [0] * 9 + [1] * 10 + [2] * 5
    later_epoch = {packs.place(24 + i) for i in range(24)}
    assert later_epoch == {packs.place(i) for i in range(24)}
    held_out = make_packs(prepared, streaming=True, holdout=0.1, held_out=True)
    assert {held_out.place(i).window for i in range(held_out.available(99))} == {0}
    again = make_packs(PreparedSet.open(tmp_path / "set"), streaming=True, holdout=0.1)
    assert [again.place(i) for i in range(60)] == [packs.place(i) for i in range(60)]


def test_places_are_found_as_well_after_the_end_as_before(make_packs, random_documents):
    packs = make_packs(random_documents([30] * 7), window_documents=3)
    forward = [packs.place(i) for i in range(40)]
    fresh = make_packs(packs.sources[0].plans.prepared)
    numbers = np.random.default_rng(0).permutation(40).tolist()
    assert [fresh.place(i) for i in numbers] == [forward[i] for i in numbers]
