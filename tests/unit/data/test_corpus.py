"""The corpus: split, packed, fingerprinted, the same every time."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from data.config import DataConfig
from data.corpus import PackedSet, load_corpus
from data.errors import DataError

SMALL = str(Path(__file__).parents[2] / "golden" / "tokenizer.json")


def stretches(packs: PackedSet) -> list[tuple[int, int]]:
    """(first, end) of every piece in the token array, in order."""
    plan = packs.plan
    ends = plan.starts + plan.lengths
    return sorted(zip(plan.starts.tolist(), ends.tolist(), strict=True))


@pytest.fixture(scope="module")
def corpus(make_data, model):
    return load_corpus(make_data(), model, seed=5)


def test_every_token_is_in_one_of_the_sets(corpus):
    both = sorted(stretches(corpus.train) + stretches(corpus.heldout))
    assert both[0][0] == 0
    assert both[-1][1] == len(corpus.train.tokens)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(both))
    assert corpus.train.real_tokens + corpus.heldout.real_tokens == len(corpus.train.tokens)


def test_no_document_is_in_both_sets(corpus, model):
    """Its pieces follow each other from bos to eos, so a border between sets is at an eos."""
    train = set(stretches(corpus.train))
    both = sorted(stretches(corpus.train) + stretches(corpus.heldout))
    for before, after in itertools.pairwise(both):
        if (before in train) != (after in train):
            assert corpus.train.tokens[before[1] - 1] == model.eos_token_id
            assert corpus.train.tokens[after[0]] == model.bos_token_id


def test_the_embedded_corpus_holds_out_its_share(corpus):
    from pydoc_data.topics import topics

    assert corpus.documents == len(topics)
    assert len(corpus.heldout) > 0
    assert corpus.train.padding_share < 0.02


def test_the_released_tokenizer_gives_the_embedded_corpus_its_size(make_model):
    model = make_model(
        vocab_size=129280,
        engram_layer_ids=(1,),
        engram_num_embeddings=(384006168,),
        engram_n_heads=8,
        engram_vocab_size=16000000,
        engram_compressed_vocab_size=99092,
    )
    corpus = load_corpus(DataConfig(source="embedded", pack_length=512, holdout=0), model, seed=0)
    assert len(corpus.heldout) == 0
    assert 90_000 < corpus.train.real_tokens < 250_000  # the topics grow with Python's version


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
    assert (len(corpus.train), len(corpus.heldout)) == (1, 0)
    assert corpus.heldout.padding_share == 0


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


def test_fingerprints_do_not_depend_on_the_array_layout(corpus, make_data, model):
    other = load_corpus(make_data(), model, seed=5)
    assert np.shares_memory(other.train.tokens, other.heldout.tokens)
    assert other.fingerprint == corpus.fingerprint
