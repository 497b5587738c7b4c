"""indexer.train: what learns, by what count its loss is divided, what is recorded."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from data.corpus import load_corpus
from data.loader import batches
from trainer.config import IndexerConfig
from trainer.learner import build_learner
from trainer.optim import named_parameters
from trainer.ranks import Ranks
from trainer.records import step_record
from trainer.state import TrainState
from trainer.step import StepSettings, TokenCounts, train_step

SETTINGS = StepSettings(lr=1e-3, table_lr=5e-3, clip_norm=1.0, recall=True)


@pytest.fixture(scope="module")
def choosing(config):
    """Four of up to 64 entries are selected: there is a choice in most documents."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, index_topk=4))


@pytest.fixture(scope="module")
def corpus(choosing):
    return load_corpus(choosing.data, choosing.model, seed=choosing.seed)


def steps(corpus, count):
    return list(
        batches(
            corpus.train,
            first_step=0,
            steps=count,
            packs_per_step=4,
            packs_per_micro_batch=2,
            rank=0,
            ranks=1,
            workers=0,
        )
    )


def test_who_learns(config):
    model = config.model
    started = dataclasses.replace(model, weights="/released")
    assert IndexerConfig().distills(model)
    assert not IndexerConfig().distills(started)
    for chosen, learns in (("distill", True), ("frozen", False)):
        assert IndexerConfig(chosen).distills(model) is learns  # type: ignore[arg-type]
        assert IndexerConfig(chosen).distills(started) is learns  # type: ignore[arg-type]


def test_the_optimiser_has_the_indexer_when_it_learns(choosing):
    def known(train):
        learner = build_learner(dataclasses.replace(choosing, indexer=IndexerConfig(train)))
        return {n for n, _ in named_parameters(learner.optimizer)}

    learning, frozen = known("distill"), known("frozen")
    assert not any(".indexer." in name for name in frozen)
    extra = learning - frozen
    assert {name.split(".indexer.")[1] for name in extra} == {
        "wq_b.weight",
        "weights_proj.weight",
        "wk.weight",
        "k_norm.weight",
    }


def test_the_count_is_that_of_tokens_that_see_an_entry(choosing, corpus):
    (found,) = steps(corpus, 1)
    model = choosing.model
    sources = [n for n in range(model.num_hidden_layers) if n in model.index_source_layer_ids]
    expected = 0
    for batch in found:
        for seq, position in zip(
            batch.seq_ids.flatten(), batch.position_ids.flatten(), strict=True
        ):
            for n in sources:
                expected += int(seq) > 0 and (int(position) + 1) // model.ratio(n) > 0
    counts = TokenCounts.of(found, model, Ranks())
    assert len(sources) == 3
    assert counts.index_queries == expected < 3 * counts.real


def test_a_frozen_indexer_stays_and_measures_nothing(choosing, corpus):
    frozen = dataclasses.replace(choosing, indexer=IndexerConfig("frozen"))
    learner = build_learner(frozen)
    before = {n: p.clone() for n, p in learner.model.named_parameters() if ".indexer." in n}
    (found,) = steps(corpus, 1)
    result = train_step(learner, found, SETTINGS, ranks=Ranks())
    assert result.index_loss is result.index_recall is None
    after = dict(learner.model.named_parameters())
    assert before and all(torch.equal(after[n], p) for n, p in before.items())


def test_the_record_has_means_over_all_choosing_tokens(choosing, corpus):
    learner = build_learner(choosing)
    (found,) = steps(corpus, 1)
    alone = [train_step(build_learner(choosing), [part], SETTINGS, ranks=Ranks()) for part in found]
    result = train_step(learner, found, SETTINGS, ranks=Ranks())
    counts = [part.tokens.index_queries for part in alone]
    assert result.tokens.index_queries == sum(counts)
    pairs = zip(alone, counts, strict=True)
    mean = sum(part.index_loss * count for part, count in pairs) / sum(counts)  # type: ignore[operator]
    assert result.index_loss == pytest.approx(mean, rel=1e-5)
    state = TrainState(seed=0, packs_per_step=4, data_fingerprint="", plan_fingerprint="")
    record = step_record(result, state, lr=1e-3, seconds=1.0, waited=0.0)
    assert record["index_loss"] == result.index_loss
    assert 0 < record["index_recall"] < 1
    quiet = dataclasses.replace(SETTINGS, recall=False)
    assert train_step(learner, found, quiet, ranks=Ranks()).index_recall is None
