"""The corpus: split, packed, fingerprinted, the same every time."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from data.config import MixtureSource
from data.corpus import load_corpus
from data.errors import DataError
from data.packs import PackedSet, Place

SMALL = str(Path(__file__).parents[2] / "golden" / "tokenizer.json")


def stretches(packs: PackedSet) -> list[tuple[int, int]]:
    """(first, end) of every piece of the only window, in order."""
    [source] = packs.sources
    plan, held_out = source.plans.plan(0), source.held_out(0)
    assert held_out is not None
    numbers = held_out if packs.held_out else range(plan.training)
    found = []
    for number in numbers:
        starts, lengths, _ = packs.pieces(Place(0, 0, number))
        found += zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    return sorted(found)


@pytest.fixture(scope="module")
def corpus(make_data, model):
    return load_corpus(make_data(), model, seed=5)


def test_every_token_is_in_one_of_the_sets(corpus):
    both = sorted(stretches(corpus.train) + stretches(corpus.heldout))
    assert both[0][0] == 0
    assert both[-1][1] == len(corpus.train.tokens(Place(0, 0, 0)))
    assert all(a[1] == b[0] for a, b in itertools.pairwise(both))


def test_no_document_is_in_both_sets(corpus, model):
    """Its pieces follow each other from bos to eos, so a border between sets is at an eos."""
    train, tokens = set(stretches(corpus.train)), corpus.train.tokens(Place(0, 0, 0))
    both = sorted(stretches(corpus.train) + stretches(corpus.heldout))
    for before, after in itertools.pairwise(both):
        if (before in train) != (after in train):
            assert tokens[before[1] - 1] == model.eos_token_id
            assert tokens[after[0]] == model.bos_token_id


def test_the_embedded_corpus_holds_out_its_share(corpus):
    from pydoc_data.topics import topics

    assert corpus.documents == len(topics)
    tokens, bos = corpus.train.tokens(Place(0, 0, 0)), 0
    held_out = sum(tokens[first] == bos for first, _ in stretches(corpus.heldout))
    assert held_out == round(0.05 * len(topics))
    train = sum(end - first for first, end in stretches(corpus.train))
    assert train / (corpus.train.sources[0].packs(0) * 64) > 0.98


def test_the_released_tokenizer_gives_the_embedded_corpus_its_size(make_data, make_model):
    model = make_model(
        vocab_size=129280,
        engram_layer_ids=(1,),
        engram_num_embeddings=(384006168,),
        engram_n_heads=8,
        engram_vocab_size=16000000,
        engram_compressed_vocab_size=99092,
    )
    data = make_data(tokenizer="deepseek", pack_length=512, holdout=0)
    corpus = load_corpus(data, model, seed=0)
    assert corpus.heldout.available(1) == 0
    tokens = sum(end - first for first, end in stretches(corpus.train))
    assert 90_000 < tokens < 250_000  # the topics grow with Python's version


def test_the_fingerprint_follows_the_data(make_data, model, write_jsonl):
    def load(*texts, seed=0, **changes):
        path = write_jsonl(*({"text": text} for text in texts))
        data = make_data(source="jsonl", paths=(str(path),), **changes)
        return load_corpus(data, model, seed=seed)

    base = load("one", "two", "three four")
    again = load("one", "two", "three four")
    assert base.fingerprint == again.fingerprint
    assert base.plan_fingerprint == again.plan_fingerprint
    assert len(base.fingerprint) == 64
    others = [load("one", "two", "three  four"), load("two", "one", "three four"), load("one")]
    assert base.fingerprint not in {other.fingerprint for other in others}
    for other in (load("one", "two", "three four", pack_length=32),):
        assert other.fingerprint == base.fingerprint
        assert other.plan_fingerprint != base.plan_fingerprint


def test_a_single_document_is_trained_on(make_data, model, write_jsonl):
    path = write_jsonl({"text": "only one"})
    corpus = load_corpus(make_data(source="jsonl", paths=(str(path),)), model, seed=0)
    assert (corpus.train.sources[0].packs(0), corpus.heldout.available(1)) == (1, 0)


def test_bad_data_is_no_configuration_error(make_data, model, write_jsonl):
    path = write_jsonl({"text": "fine"}, "")
    with pytest.raises(DataError, match=r"corpus\.jsonl:2"):
        load_corpus(make_data(source="jsonl", paths=(str(path),)), model, seed=0)


def test_loading_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys\n"
        "import data.corpus, data.order, data.sources.opening, model.engram.hashing\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
def test_a_mixture_is_packs_of_its_sources_by_weight(make_data, model, write_jsonl, weights):
    paths = [
        str(write_jsonl(*({"text": f"{word} " * 9} for _ in range(20)), name=f"{word}.jsonl"))
        for word in ("red", "blue")
    ]
    mixture = {
        name: MixtureSource(source="jsonl", paths=(path,), weight=weight)
        for name, path, weight in zip(("first", "second"), paths, weights, strict=True)
    }
    corpus = load_corpus(make_data(source="mixture", mixture=mixture), model, seed=0)
    assert [source.name for source in corpus.train.sources] == [
        "data.mixture.first",
        "data.mixture.second",
    ]
    counts = np.bincount([corpus.train.place(i).source for i in range(400)])
    np.testing.assert_allclose(counts / 400, np.array(weights) / sum(weights), atol=0.01)


def test_a_streaming_source_is_trained_on_while_it_is_still_read(make_data, model, write_jsonl):
    """Another process reads it; every token comes once, in the order of arrival."""
    path = write_jsonl(*({"text": f"{number} cats sat down " * 60} for number in range(6000)))
    data = make_data(
        source="jsonl", paths=(str(path),), streaming=True, window_documents=500, holdout=0
    )
    corpus = load_corpus(data, model, seed=0)
    [source] = corpus.train.sources
    prepared = source.plans.prepared
    began_early = not prepared.complete
    seen: set[Place] = set()
    windows: list[int] = []
    for index in itertools.count():
        place = corpus.train.place(index)
        if place in seen:
            break
        seen.add(place)
        windows.append(place.window)
    assert began_early, "the first window should be there long before the last"
    assert windows == sorted(windows)
    assert set(windows) == set(range(12))
    tokens = sum(int(corpus.train.pieces(place)[1].sum()) for place in seen)
    assert tokens == sum(int(prepared.offsets(window)[-1]) for window in range(12))
    again = load_corpus(data, model, seed=0)
    assert again.fingerprint == corpus.fingerprint
    assert [again.train.place(i) for i in range(0, len(seen), 97)] == [
        corpus.train.place(i) for i in range(0, len(seen), 97)
    ]
