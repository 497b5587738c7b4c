"""The Engram token map: tokenizer ids -> compressed ids, equal for tokens that read alike.

"The", "the" and "THE" are one word to the memory. Every hash depends on this map, so it must be
exact: a different count of compressed ids moves every row of every table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LONE_SPACE = "\ue000"  # stands in for a token that is one space, which Strip would erase
ASCII_SPACE = " \t\n\v\f\r"


def compressed_token_map(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Compressed id of every token: int32 [len(tokenizer)], numbered by first appearance.

    Tokens share an id when their decoded texts have one normal form: NFKC, NFD, without accents
    (categories Mn, Mc, Me), lower case, runs of [ \\t\\r\\n] as one space, stripped (a lone space
    stays). A text with an empty normal form stands for itself. A token that is no whole text by
    itself (it decodes to U+FFFD) stands for its raw vocabulary entry. The released tokenizer's
    129,280 tokens give 99,092 ids, in about half a second.
    """
    backend = tokenizer.backend_tokenizer
    ids = range(len(tokenizer))
    # The backend's own decoder: the wrapper may be set to clean up spaces, which changes texts.
    texts = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    normalise = _normaliser()
    numbers: dict[str, int] = {}
    out = np.empty(len(texts), dtype=np.int32)
    for i, text in enumerate(texts):
        if text.isascii():
            key = _normal_ascii(text)
        elif "\ufffd" in text:
            key = backend.id_to_token(i)
        else:
            key = normalise(text)
        out[i] = numbers.setdefault(key or text, len(numbers))
    return out


def check_compressed_size(token_map: np.ndarray, *, expected: int) -> None:
    """Refuse a tokenizer whose map does not have the `expected` count of compressed ids."""
    found = int(token_map.max()) + 1 if token_map.size else 0
    if found != expected:
        raise ValueError(
            f"the tokenizer compresses to {found:,} Engram ids, but the model's "
            f"engram_compressed_vocab_size is {expected:,}; every Engram row depends on this "
            f"count. Use the tokenizer the model was made for, or, for a new model, set "
            f"engram_compressed_vocab_size={found}"
        )


def compress(token_map: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Compressed ids of token ids, int64, same shape. Ids that the tokenizer lacks are refused.

    A model's vocabulary may be larger than the tokenizer; those entries have no text, so no
    compressed id.
    """
    lowest, highest = (int(ids.min()), int(ids.max())) if ids.size else (0, -1)
    if lowest < 0 or highest >= len(token_map):
        raise ValueError(
            f"token id {lowest if lowest < 0 else highest} has no Engram id: the tokenizer has "
            f"{len(token_map):,} tokens. Encode the data with the tokenizer that the model uses"
        )
    return token_map[ids].astype(np.int64)


def _normaliser():
    from tokenizers import Regex, normalizers

    # Rust's own normalisers, not unicodedata and str.lower: their Unicode tables and their
    # treatment of a final sigma decide which tokens fall together.
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(LONE_SPACE, " "),
        ]
    ).normalize_str


def _normal_ascii(text: str) -> str:
    """What the normaliser makes of ASCII text, six times as fast; most tokens are ASCII."""
    text = text.lower()
    if text.isalnum():
        return text
    for space in "\t\r\n":
        text = text.replace(space, " ")
    while "  " in text:
        text = text.replace("  ", " ")
    return text if text == " " else text.strip(ASCII_SPACE)
