"""Texts become [bos, tokens, eos], whole."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.documents import Document
from data.kinds.pretrain import Pretrain
from data.tokenizer import Encoder, load_tokenizer

SMALL = Path(__file__).parents[3] / "golden" / "tokenizer.json"


@pytest.fixture(scope="module")
def small(model) -> Encoder:
    return replace(Encoder.for_model(model, tokenizer=str(SMALL)), image=3)


def only(found) -> str:
    (told,) = found
    assert isinstance(told, str)
    return told


def test_documents_are_framed(small):
    written = ["Hello, world.", "naïve ﬁ", "def f(x):\n    return x", "<eos>a"]
    found = Pretrain(small, "text").encode([{"text": text} for text in written])
    tokenizer = load_tokenizer(str(SMALL))
    for text, document in zip(written, found, strict=True):
        assert isinstance(document, Document)
        assert document.tokens.dtype == np.int32
        assert document.labelled is None
        ids = document.tokens.tolist()
        assert (ids[0], ids[-1]) == (small.bos, small.eos)
        assert ids[1:-1] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["deepseek", str(SMALL)])
def test_ids_are_those_of_the_full_tokenizer(small, name):
    """transformers wraps the same file; nothing of it may be needed for the ids."""
    from pydoc_data.topics import topics

    texts = [*list(topics.values())[:10], " ÄÖ  \t\n\n漢字かな 12345 <eos> <｜User｜>x", ""]
    ids = replace(small, tokenizer=name).encode(texts)
    wrapped = load_tokenizer(name)
    for text, found in zip(texts, ids, strict=True):
        assert found.tolist() == wrapped.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"body": "x", "n": 2}, ["no field 'text'", "'body', 'n'", "data.fields"]),
        ({}, ["no field 'text'", "none"]),
        ({"text": None}, ["a NoneType"]),
        ({"text": 3}, ["a int"]),
        ({"text": ""}, ["field 'text' is empty"]),
        ({"text": " \n"}, ["field 'text' is empty"]),
        ({"text": "a\ud800b"}, ["surrogate"]),
        ({"text": "<eos>"}, ["nothing but special tokens"]),
        ({"text": "<bos><eos>"}, ["nothing but special tokens"]),
        ({"text": "<pad><image>"}, ["nothing but special tokens"]),
        ({"text": "a <image> b"}, ["'<image>', the mark of an image", "remove it"]),
    ],
)
def test_what_cannot_be_used_is_told(small, value, words):
    good = {"text": "fine"}
    first, told, last = Pretrain(small, "text").encode([good, value, good])
    assert isinstance(first, Document) and isinstance(last, Document)
    assert isinstance(told, str)
    assert all(word in told for word in words)
    assert len(told) < 200


def test_tokens_past_the_models_vocabulary(small):
    few = replace(small, vocab_size=20)
    assert "out of the model's vocabulary of 20" in only(
        Pretrain(few, "text").encode([{"text": "words"}])
    )


def test_a_tokenizers_own_truncation_and_padding_are_off(small, tmp_path):
    spec = json.loads(SMALL.read_text(encoding="utf-8"))
    spec["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    spec["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    texts = ["a", "many words that are longer than four tokens"]
    for mine, plain in zip(
        replace(small, tokenizer=str(path)).encode(texts), small.encode(texts), strict=True
    ):
        np.testing.assert_array_equal(mine, plain)


def test_the_settings_follow_the_tokenizers_content(small, tmp_path):
    path = tmp_path / "copy.json"
    path.write_bytes(SMALL.read_bytes())
    same = replace(small, tokenizer=str(path))
    assert same.settings() == small.settings()
    path.write_bytes(SMALL.read_bytes() + b"\n")
    assert same.settings() != small.settings()
