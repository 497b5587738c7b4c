"""Encoders of the small tokenizer with the marks of the chat form."""

from dataclasses import replace

import pytest

from data.tokenizer import Encoder


@pytest.fixture(scope="session")
def encoder(model, chat_tokenizer) -> Encoder:
    return replace(Encoder.for_model(model, tokenizer=str(chat_tokenizer)), image=3)
