"""A run's corpus: prepared documents, split and packed, the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from data.cache.prepare import PreparedSource, prepare
from data.config import DataConfig
from data.engram import RowHasher
from data.kinds.opening import kind_problems
from data.packs import PackedSet, PackSource
from data.plan.settings import PlanSettings
from data.plan.stored import StoredPlans
from data.tokenizer import Encoder, tokenizer_problems

if TYPE_CHECKING:
    from model.config import ModelConfig


@dataclass(frozen=True)
class Corpus:
    """Training and held-out packs of one run. No document is in both.

    fingerprint: SHA-256 that identifies the documents; another one means other data. (Of a
    streaming source, whose documents are not all there, it covers what they are read from.)
    plan_fingerprint: SHA-256 of everything else that decides which tokens stand where in which
    pack, and from which source each pack comes; together with the seed it fixes what every global
    pack index holds.
    """

    train: PackedSet
    heldout: PackedSet
    fingerprint: str
    plan_fingerprint: str

    @property
    def documents(self) -> int:
        """Documents that are there, of all sources."""
        sets = [source.plans.prepared for source in self.train.sources]
        return sum(s.documents(window) for s in sets for window in range(s.windows))


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
        found += kind_problems(source, encoder, model.vision, name=name)
    return found


def load_corpus(
    data: DataConfig,
    model: ModelConfig,
    *,
    seed: int,
    made: Sequence[PreparedSource] | None = None,
) -> Corpus:
    """The documents of `data` as packs for `model`. Packs are planned when they are asked for.

    made: the sources of `data`, as `prepare` made them; None prepares them now, which no process
    does that others wait for. ValueError lists every fault of the configuration; DataError names
    the file and line of bad data.
    """
    if made is None:
        if found := data_problems(data, model):
            raise ValueError("\n".join(found))
        made = prepare(data, model, say=lambda text: None)
    sources = pack_sources(data, model, made, seed=seed)
    train = PackedSet(
        sources=sources,
        pack_length=data.pack_length,
        pad_token_id=model.pad_token_id,
        seed=seed,
        hasher=RowHasher.for_model(model, tokenizer=data.tokenizer),
        vision=model.vision if model.vision.num_hidden_layers else None,
    )
    return Corpus(
        train=train,
        heldout=replace(train, held_out=True),
        fingerprint=_sha256([_documents(source) for source in sources]),
        plan_fingerprint=_sha256([_packing(source) for source in sources]),
    )


def pack_sources(
    data: DataConfig, model: ModelConfig, made: Sequence[PreparedSource], *, seed: int
) -> tuple[PackSource, ...]:
    """The prepared sources of `data`, to be packed for `model`."""
    found = []
    for (name, config), prepared in zip(data.named_sources(), made, strict=True):
        settings = PlanSettings(
            pack_length=data.pack_length,
            alignment=model.alignment,
            on_long_document=config.on_long_document,
            holdout=data.holdout,
            seed=seed,
            streaming=config.streaming,
        )
        plans = StoredPlans(prepared.set, settings)
        found.append(PackSource(name, plans, prepared.weight, prepared.epochs))
    return tuple(found)


def _documents(source: PackSource) -> list[str]:
    prepared = source.plans.prepared
    if source.streaming:
        return [prepared.fingerprint]
    return [prepared.digest(window) for window in range(prepared.windows)]


def _packing(source: PackSource) -> list[str]:
    return [source.plans.settings.key(*_documents(source)), repr(source.weight)]


def _sha256(value: list[list[str]]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
