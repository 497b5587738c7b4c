"""Texts become [bos, tokens, eos], whole, in flat arrays."""

import json
from pathlib import Path

import numpy as np
import pytest

from data import documents as documents_module
from data.documents import tokenise
from data.errors import DataError
from data.tokenizer import load_tokenizer

SMALL = Path(__file__).parents[2] / "golden" / "tokenizer.json"


def test_documents_are_framed_and_laid_end_to_end(make_data, model, write_jsonl):
    written = ["Hello, world.", "naïve ﬁ", "def f(x):\n    return x"]
    path = write_jsonl(*({"text": text} for text in written))
    data = make_data(source="jsonl", paths=(str(path),))
    found = tokenise(data, model)
    assert found.tokens.dtype == np.int32
    assert found.offsets.dtype == np.int64
    assert len(found) == 3
    tokenizer = load_tokenizer(data.tokenizer)
    for i, text in enumerate(written):
        ids = found.tokens[found.offsets[i] : found.offsets[i + 1]].tolist()
        assert ids[0] == model.bos_token_id
        assert ids[-1] == model.eos_token_id
        assert ids[1:-1] == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids[1:-1]) == text
    assert found.offsets[-1] == len(found.tokens)


def test_chunks_do_not_show(make_data, model, monkeypatch):
    whole = tokenise(make_data(), model)
    monkeypatch.setattr(documents_module, "CHUNK_CHARACTERS", 5000)
    seen: list[tuple[int, int]] = []
    parts = tokenise(make_data(), model, progress=lambda done, total: seen.append((done, total)))
    np.testing.assert_array_equal(whole.tokens, parts.tokens)
    np.testing.assert_array_equal(whole.offsets, parts.offsets)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("text", ["<eos>", "<bos><eos>", "<pad><image>"])
def test_a_document_of_special_tokens_is_named(make_data, model, write_jsonl, text):
    path = write_jsonl({"text": "fine"}, {"text": text})
    with pytest.raises(DataError, match=r"corpus\.jsonl:2: nothing but special tokens"):
        tokenise(make_data(source="jsonl", paths=(str(path),)), model)


def test_special_tokens_beside_text_are_kept(make_data, model, write_jsonl):
    path = write_jsonl({"text": "<eos>a"})
    found = tokenise(make_data(source="jsonl", paths=(str(path),)), model)
    assert found.tokens[:2].tolist() == [model.bos_token_id, model.eos_token_id]
    assert len(found.tokens) == 4


def test_a_tokenizers_own_truncation_and_framing_are_off(make_data, model, tmp_path, write_jsonl):
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
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(spec), encoding="utf-8")
    path = write_jsonl({"text": "a"}, {"text": "many words that are longer than four tokens"})
    data = make_data(source="jsonl", paths=(str(path),), tokenizer=str(tokenizer))
    plain = tokenise(make_data(source="jsonl", paths=(str(path),)), model)
    np.testing.assert_array_equal(tokenise(data, model).tokens, plain.tokens)
    assert len(plain.tokens) > 13
