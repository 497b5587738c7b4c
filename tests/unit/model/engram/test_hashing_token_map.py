"""The token map against the released numbers and a slow reference on unicodedata."""

import hashlib
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data.tokenizer import load_token_map, load_tokenizer
from model.engram.token_map import (
    _normal_ascii,
    _normaliser,
    check_compressed_size,
    compress,
    compressed_token_map,
)

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture(scope="module")
def case() -> dict:
    return json.loads((GOLDEN / "hash_released" / "case.json").read_text(encoding="utf-8"))


def slow_key(text: str, raw: str) -> str:
    if "\ufffd" in text:
        return raw
    out = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    out = "".join(c for c in out if unicodedata.category(c) not in ("Mn", "Mc", "Me"))
    out = "".join(c.lower() for c in out)
    words, run = "", False
    for c in out:
        if c in " \t\r\n":
            words += "" if run else " "
        else:
            words += c
        run = c in " \t\r\n"
    return (words if words == " " else words.strip()) or text


def slow_map(tokenizer) -> list[int]:
    numbers: dict[str, int] = {}
    out = []
    for i in range(len(tokenizer)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        key = slow_key(text, tokenizer.convert_ids_to_tokens(i))
        out.append(numbers.setdefault(key, len(numbers)))
    return out


def test_the_released_map(case):
    found = load_token_map("deepseek")
    assert found.dtype == np.int32
    assert found.shape == (129280,)
    np.testing.assert_array_equal(
        found, load_file(GOLDEN / "hash_released" / "hash.safetensors")["token_map"]
    )
    assert hashlib.sha256(found.tobytes()).hexdigest() == case["token_map_sha256"]
    assert int(found.max()) + 1 == case["compressed_vocab_size"] == 99092
    assert found[2] == case["pad_row_id"]
    check_compressed_size(found, expected=99092)


def test_the_released_tokenizer_encodes_as_recorded(case):
    backend = load_tokenizer("deepseek").backend_tokenizer
    text = "\n\n".join(case["text"])
    assert backend.encode(text, add_special_tokens=False).ids == case["text_ids"]


def test_the_small_tokenizer_compresses_to_323():
    tokenizer = load_tokenizer(str(GOLDEN / "tokenizer.json"))
    found = compressed_token_map(tokenizer)
    assert found.shape == (400,)
    assert int(found.max()) + 1 == 323
    assert found.tolist() == slow_map(tokenizer)


def test_words_that_read_alike_fall_together():
    groups = [
        ["The", "the", "THE", " the", "the\n"],
        ["café", "cafe", "CAFÉ", "cafe\u0301"],
        ["ﬁ", "fi", "ＦＩ"],
        [" ", "\n", "\t \r\n", "\u3000"],
        ["a b", "a \t b", "A\nB"],
        ["\u0301"],  # nothing is left of it: it stands for itself
        ["\u0300"],
        ["\x0b"],  # stripped, but no part of a run
        ["ΣΑΣ", "σασ"],  # no final sigma
        ["ς"],
        ["1", "①", "１"],
    ]
    words = [word for group in groups for word in group]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="The"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    found = compressed_token_map(tokenizer)
    expected = [number for number, group in enumerate(groups) for _ in group]
    assert found.tolist() == expected
    assert slow_map(tokenizer) == expected


@given(st.text(st.characters(max_codepoint=127)))
def test_the_short_way_for_ascii_is_the_normaliser(text):
    assert _normal_ascii(text) == _normaliser()(text)


def test_clean_up_of_spaces_has_no_say():
    plain = load_tokenizer(str(GOLDEN / "tokenizer.json"))
    cleaning = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, clean_up_tokenization_spaces=True
    )
    np.testing.assert_array_equal(compressed_token_map(cleaning), compressed_token_map(plain))


def test_another_count_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"323.*99,092"):
        check_compressed_size(load_token_map(str(GOLDEN / "tokenizer.json")), expected=99092)


def test_compress_gives_int64_of_the_same_shape():
    ids = np.array([[2, 0], [1, 2]], dtype=np.int32)
    found = compress(np.array([5, 4, 9], dtype=np.int32), ids)
    assert found.dtype == np.int64
    assert found.tolist() == [[9, 5], [4, 9]]


@pytest.mark.parametrize("bad", [400, 447, -1])
def test_ids_past_the_tokenizer_are_refused(bad):
    token_map = load_token_map(str(GOLDEN / "tokenizer.json"))
    with pytest.raises(ValueError, match=rf"{bad}.*400"):
        compress(token_map, np.array([1, bad]))
