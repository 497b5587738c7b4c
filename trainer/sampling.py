"""Text from a model, one token at a time, so that a person can look at what it has learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.engram import RowHasher
from model.config import ModelConfig
from model.engram.store import RowStore
from model.engram.streaming import StreamingHasher
from model.engram.token_map import compress
from model.layout import ModelInputs
from model.transformer import DeepseekV41
from trainer.ranks import Ranks

ONE_RANK = Ranks()


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and how many at most.

    temperature: 0 takes the likeliest token. top_p: only the likeliest tokens that together have
    this probability stand for choice.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0

    def problems(self) -> list[str]:
        """Broken rules, each with its fix."""
        found = []
        if self.max_tokens < 1:
            found.append(f"max-tokens={self.max_tokens} must be 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(f"temperature={self.temperature} must be 0 (no chance) or more")
        if not 0 < self.top_p <= 1:
            found.append(f"top-p={self.top_p} must be above 0 and at most 1")
        return found


class NextToken:
    """Logits of the token that follows a growing text.

    Every call runs the training forward over the whole text: exact by construction, and without a
    second implementation of every cache that attention has; the cost of a token grows with the
    text. Only Engram rows are carried along. All ranks of a sharded model call it together.
    """

    def __init__(self, model: DeepseekV41, store: RowStore, hasher: RowHasher | None) -> None:
        """hasher: of the model's tokenizer; None for a model without Engram."""
        self._model, self._store, self._hasher = model, store, hasher
        self._ids = np.zeros(0, dtype=np.int64)
        self._rows = np.zeros((0, 0, 0), dtype=np.int64)
        if hasher is not None:
            self._stream = StreamingHasher(hasher.geometry, pad_id=hasher.pad_id)
            self._rows = self._stream.extend(self._ids)

    @torch.no_grad()
    def after(self, tokens: Sequence[int]) -> Tensor:
        """fp32 [vocab_size]: the text is longer by `tokens`, which are not empty."""
        added = np.asarray(tokens, dtype=np.int64)
        if self._hasher is not None:
            rows = self._stream.extend(compress(self._hasher.token_map, added))
            self._rows = np.concatenate([self._rows, rows])
        self._ids = np.append(self._ids, added)
        ids = torch.from_numpy(self._ids)[None]
        rows = torch.from_numpy(self._rows)[None]
        if self._hasher is None:
            rows = torch.zeros(*ids.shape, 0, 0, dtype=torch.int64)
        inputs = ModelInputs(
            input_ids=ids,
            seq_ids=torch.ones_like(ids),
            position_ids=torch.arange(ids.shape[1])[None],
            token_types=torch.full_like(ids, -1, dtype=torch.int8),
        )
        window = self._store.open_window([rows])
        inputs = inputs.to(self._model.device)
        hidden = self._model(inputs, engram=window.rows(0), head=False).hidden
        assert hidden is not None
        return self._model.head(hidden[0, -1:], None)[0]


def generate(
    source: NextToken,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    config: ModelConfig,
    tokens: int,
    dice: np.random.Generator,
    ranks: Ranks = ONE_RANK,
) -> Iterator[int]:
    """The tokens that follow `prompt`, as they come, until end of text or sampling.max_tokens.

    tokens: how many the tokenizer has; ids past it have no text. Equal logits and dice give equal
    text. Several ranks follow the first one's choice, so that they end together.
    """
    banned = np.zeros(config.vocab_size, dtype=bool)
    banned[tokens:] = True
    banned[[config.bos_token_id, config.pad_token_id]] = True
    if config.image_token_id < config.vocab_size:
        banned[config.image_token_id] = True
    following: Sequence[int] = prompt
    for _ in range(sampling.max_tokens):
        logits = source.after(following).double().cpu().numpy()
        token = ranks.from_first(choose(np.where(banned, -np.inf, logits), sampling, dice))
        if token == config.eos_token_id:
            return
        yield token
        following = (token,)


def choose(logits: np.ndarray, sampling: Sampling, dice: np.random.Generator) -> int:
    """One token id, from float64 logits [V]; equally likely ones stand in order of their id."""
    order = np.argsort(-logits, kind="stable")
    if sampling.temperature == 0:
        return int(order[0])
    ranked = (logits[order] - logits[order[0]]) / sampling.temperature
    shares = np.exp(ranked)
    reached = np.cumsum(shares / shares.sum())
    # The token with which the sum reaches top_p is the last one in.
    kept = int(np.searchsorted(reached, sampling.top_p)) + 1
    point = dice.random() * reached[min(kept, len(reached)) - 1]
    return int(order[np.searchsorted(reached, point, side="right")])
