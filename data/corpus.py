"""A run's corpus: documents, tokenised, split and packed, the same on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.cache.prepare import PreparedSource, prepare
from data.config import DataConfig
from data.engram import RowHasher
from data.kinds.opening import kind_problems
from data.order import split_documents
from data.packing import PackPlan, plan_packs
from data.tokenizer import Encoder, tokenizer_problems

if TYPE_CHECKING:
    from model.config import ModelConfig


@dataclass(frozen=True)
class PackedSet:
    """Packs that can be turned into batches; len() is their count.

    tokens: the corpus, int32, end to end. hasher: None for a model without Engram. Plain data,
    pickled whole into each loader worker.
    """

    tokens: np.ndarray
    plan: PackPlan
    pack_length: int
    pad_token_id: int
    hasher: RowHasher | None

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def real_tokens(self) -> int:
        """Tokens of documents, in all packs."""
        return int(self.plan.lengths.sum())

    @property
    def padding_share(self) -> float:
        """Share of all packs' positions that hold no document."""
        return 1 - self.real_tokens / (len(self) * self.pack_length) if len(self) else 0.0


@dataclass(frozen=True)
class Corpus:
    """Training and held-out packs of one tokenised corpus. No document is in both.

    fingerprint: SHA-256 of all tokens and document borders; another one means other data.
    plan_fingerprint: SHA-256 of which tokens stand where in which pack; together with the seed
    it fixes what every global pack index holds.
    """

    train: PackedSet
    heldout: PackedSet
    documents: int
    fingerprint: str
    plan_fingerprint: str


def data_problems(data: DataConfig, model: ModelConfig) -> list[str]:
    """Everything wrong between the configured data and the model, short of reading documents.

    Loads the tokenizer (about two seconds for the released one). Each message names its fix.
    """
    return data.problems() + data.model_problems(model) + encoding_problems(data, model)


def encoding_problems(data: DataConfig, model: ModelConfig) -> list[str]:
    """Why the tokenizer does not fit the model or the kinds of documents."""
    if not data.tokenizer:
        return []
    if found := tokenizer_problems(data.tokenizer, model):
        return found
    encoder = Encoder.for_model(model, tokenizer=data.tokenizer)
    for name, source in data.named_sources():
        found += kind_problems(source, encoder, name=name)
    return found


def load_corpus(data: DataConfig, model: ModelConfig, *, seed: int) -> Corpus:
    """Prepare, split and pack the documents of `data` for `model`.

    ValueError lists every fault of the configuration; DataError names the file and line of bad
    data.
    """
    if found := data_problems(data, model):
        raise ValueError("\n".join(found))
    hasher = RowHasher.for_model(model, tokenizer=data.tokenizer)
    tokens, offsets = _in_memory(prepare(data, model, say=lambda text: None))
    training, held_out = split_documents(len(offsets) - 1, holdout=data.holdout, seed=seed)

    def packed(chosen: np.ndarray) -> PackedSet:
        plan = plan_packs(offsets, chosen, pack_length=data.pack_length, alignment=model.alignment)
        return PackedSet(tokens, plan, data.pack_length, model.pad_token_id, hasher)

    train, heldout = packed(training), packed(held_out)
    return Corpus(
        train=train,
        heldout=heldout,
        documents=len(offsets) - 1,
        fingerprint=_sha256(tokens.astype("<i4"), offsets.astype("<i8")),
        plan_fingerprint=_fingerprint_plans(train, heldout),
    )


def _in_memory(sources: list[PreparedSource]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32, offsets int64) of all documents."""
    if len(sources) > 1 or any(s.set.header["settings"]["kind"] != "pretrain" for s in sources):
        raise ValueError("only one source of kind pretrain can be trained on so far")
    made = sources[0].set
    windows = range(made.windows)
    lengths = np.concatenate([made.lengths(w) for w in windows])
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return np.concatenate([made.tokens(w) for w in windows]), offsets


def _fingerprint_plans(*sets: PackedSet) -> str:
    arrays = [np.array([s.pack_length for s in sets], dtype="<i8")]
    for s in sets:
        plan = s.plan
        arrays += [plan.pack_offsets, plan.starts, plan.lengths, plan.columns]
    return _sha256(*(array.astype("<i8") for array in arrays))


def _sha256(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.shape).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
