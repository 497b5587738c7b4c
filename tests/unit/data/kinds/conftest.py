"""The small tokenizer with the marks of the chat form added, and encoders of both."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.tokenizer import Encoder

MARKS = ("<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory) -> Path:
    """tokenizer.json of 405 tokens; the marks are 400 to 404."""
    golden = Path(__file__).parents[3] / "golden" / "tokenizer.json"
    spec = json.loads(golden.read_text(encoding="utf-8"))
    for number, text in enumerate(MARKS, start=400):
        spec["added_tokens"].append(
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def encoder(model, chat_tokenizer) -> Encoder:
    return replace(Encoder.for_model(model, tokenizer=str(chat_tokenizer)), image=3)
