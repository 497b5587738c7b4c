"""The trainer over a context group: a step's figures, evaluation and samples are one rank's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from data.corpus import load_corpus
from data.loader import batches
from tests.builders import trainer_config
from tests.ranks import Ranks as Pool
from trainer.config import IndexerConfig, ParallelConfig, TrainerConfig
from trainer.evaluate import evaluate
from trainer.learner import build_learner
from trainer.ranks import Ranks
from trainer.samples import say_samples
from trainer.sampling import Sampling
from trainer.step import StepSettings, train_step

pytestmark = pytest.mark.xdist_group("ranks")


def figures(config: TrainerConfig) -> dict[str, Any]:
    """Of two steps, and what the model then gives on held-out packs."""
    ranks, learner = Ranks.from_process_group(), build_learner(config)
    corpus = load_corpus(config.data, config.model, seed=config.seed)
    steps = batches(
        corpus.train,
        first_step=0,
        steps=2,
        packs_per_step=2,
        packs_per_micro_batch=2,
        rank=learner.mesh.dp_index,
        ranks=learner.mesh.dp_size,
        workers=0,
        stretch=learner.stretch,
    )
    settings = StepSettings(lr=1e-3, table_lr=5e-3, clip_norm=1.0, recall=True)
    found: dict[str, Any] = {}
    for number, micro_batches in enumerate(steps):
        result = train_step(learner, micro_batches, settings, ranks=ranks)
        for name in ("loss", "grad_norm", "balance_loss", "gate_mean", "index_loss"):
            found[f"{name} {number}"] = getattr(result, name)
        found[f"index_recall {number}"] = result.index_recall
        found[f"tokens {number}"] = dataclasses.asdict(result.tokens) | {"slots": 0}
        found[f"experts {number}"] = result.expert_counts.tolist()
    held_out = corpus.heldout
    found["eval"] = evaluate(learner, held_out, count=3, packs_per_micro_batch=1, ranks=ranks).loss
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.samples.SAMPLING", Sampling(max_tokens=3))
        say_samples(config, learner, held_out, step=2, ranks=ranks, say=said.append)
    return found | {"samples": said}


def test_figures_of_a_context_group(ranks: Pool, tmp_path: Path) -> None:
    """On packs that do not divide into two shares of whole groups."""
    config = trainer_config(tmp_path, indexer=IndexerConfig(train="distill"))
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, pack_length=98),
        model=dataclasses.replace(config.model, index_topk=4),
    )
    wanted = figures(config)
    assert wanted["index_recall 0"] is not None
    divided = dataclasses.replace(config, parallel=ParallelConfig(cp=2))
    for found in ranks.run(2, figures, divided):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, float):
                assert found[name] == pytest.approx(value, rel=1e-4), name
            else:
                assert found[name] == value, name
