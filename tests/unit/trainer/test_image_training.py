"""Training on captioned pictures: what is learnt, from what, and that seeing helps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from data.corpus import Corpus, load_corpus
from data.loader import batches
from model.layout import Images, ModelInputs
from tests.builders import seeing_config
from trainer.config import TrainerConfig
from trainer.learner import Learner, build_learner
from trainer.ranks import Ranks
from trainer.step import StepSettings, train_step

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def seeing(config: TrainerConfig, tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    made = seeing_config(tmp_path_factory.mktemp("words"))
    return dataclasses.replace(config, model=made.model, data=made.data)


@pytest.fixture(scope="module")
def corpus(seeing: TrainerConfig) -> Corpus:
    return load_corpus(seeing.data, seeing.model, seed=seeing.seed)


def stream(corpus: Corpus, steps: int, workers: int = 0):
    return batches(
        corpus.train,
        first_step=0,
        steps=steps,
        packs_per_step=1,
        packs_per_micro_batch=1,
        rank=0,
        ranks=1,
        workers=workers,
    )


def test_labels_stand_on_captions_alone(corpus: Corpus, seeing: TrainerConfig) -> None:
    (batch,) = next(iter(stream(corpus, 1)))
    assert batch.images is not None
    cells = (-(-batch.images.grids // 3)).prod(1)
    assert int(cells.sum()) == int((batch.token_types == 1).sum()) > 20
    spans = batch.token_types >= 0
    assert (batch.input_ids[spans] == seeing.model.image_token_id).all()
    assert not (batch.labels == seeing.model.image_token_id).any()
    after = torch.cat([spans[:, 1:], torch.zeros(len(spans), 1, dtype=torch.bool)], dim=1)
    assert (batch.labels[after] == -100).all()
    assert 0.2 < batch.valid_tokens / batch.real_tokens < 0.8


def learn(learner: Learner, corpus: Corpus, steps: int) -> list[float]:
    losses = []
    for step, micro_batches in enumerate(stream(corpus, steps)):
        rate = 2e-3 * min(1.0, (step + 1) / 10, (steps - step) / (0.4 * steps))
        settings = StepSettings(lr=rate, table_lr=5 * rate, clip_norm=1.0)
        result = train_step(learner, micro_batches, settings, ranks=Ranks())
        assert result.loss is not None
        losses.append(result.loss)
    return losses


def test_the_loss_falls_and_the_tower_learns(corpus: Corpus, seeing: TrainerConfig) -> None:
    learner = build_learner(seeing)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    losses = learn(learner, corpus, 12)
    assert losses[0] > 5.5 and losses[-1] < 4
    still = [
        name
        for name, p in learner.model.named_parameters()
        if name.startswith(("vision.", "aligner.", "image_")) and torch.equal(p, before[name])
    ]
    assert still == []


@pytest.mark.long
def test_captions_are_read_off_the_pictures(corpus: Corpus, seeing: TrainerConfig) -> None:
    """Of held-out pictures: with another one's pixels in their place the caption is missed."""
    learner = build_learner(seeing)
    learn(learner, corpus, 240)
    batch = next(
        iter(
            batches(
                dataclasses.replace(corpus.train, held_out=True),
                first_step=0,
                steps=1,
                packs_per_step=1,
                packs_per_micro_batch=1,
                rank=0,
                ranks=1,
                workers=0,
            )
        )
    )[0]
    assert batch.images is not None
    images = Images(batch.images.patches, batch.images.grids)
    others = dataclasses.replace(images, patches=images.patches.roll(36, 0))
    losses = []
    for shown in (images, others):
        inputs = ModelInputs(
            batch.input_ids, batch.seq_ids, batch.position_ids, batch.token_types, shown
        )
        window = learner.store.open_window([batch.engram_rows])
        with torch.no_grad():
            out = learner.model(inputs, engram=window.rows(0), labels=batch.labels)
        losses.append(float(out.loss_sum) / batch.valid_tokens)
    assert losses[0] < 0.6 * losses[1]
