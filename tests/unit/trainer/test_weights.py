"""A run that starts from released weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.errors import DataError
from model.config import EngramStoreConfig
from model.engram.owners import OwnerStore
from model.names import released_slots, table_name
from trainer.config import TrainerConfig
from trainer.exit_codes import ExitCode
from trainer.failures import failure_outcome
from trainer.learner import Learner, build_learner
from trainer.loop import train
from trainer.ranks import Ranks


@pytest.fixture
def from_weights(config: TrainerConfig, pristine) -> TrainerConfig:
    return replace(config, model=replace(pristine.config, weights=str(pristine.path)))


def released_values(learner: Learner) -> dict[str, Tensor]:
    found = {}
    model = learner.model
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found |= dict(released_slots(name, tensor.detach()))
    if isinstance(learner.store, OwnerStore):
        for layer, weight in zip(learner.store.layers, learner.store.weight, strict=True):
            found[table_name(layer)] = weight
    return found


def test_everything_starts_with_the_folders_values(from_weights: TrainerConfig, pristine) -> None:
    done: list[tuple[int, int]] = []
    learner = build_learner(from_weights, progress=lambda a, b: done.append((a, b)))
    found = released_values(learner)
    assert found.keys() == pristine.decoded.keys()
    for name, expected in pristine.decoded.items():
        assert torch.equal(found[name], expected), name
    total = sum(t.numel() for t in pristine.decoded.values())
    assert done[-1] == (total, total)
    frozen = {n for n, p in learner.model.named_parameters() if not p.requires_grad}
    assert frozen == {n for n, _ in learner.model.named_parameters() if ".indexer." in n}


def test_mapped_tables_are_left_where_they_are(from_weights: TrainerConfig, pristine) -> None:
    mapped = EngramStoreConfig(store="mapped", path=str(pristine.path))
    learner = build_learner(replace(from_weights, model=replace(from_weights.model, engram=mapped)))
    tables = {table_name(n) for n in pristine.config.engram_layers}
    assert released_values(learner).keys() == pristine.decoded.keys() - tables
    learner.store.close()


def test_a_restored_learner_reads_no_weights(from_weights: TrainerConfig) -> None:
    nowhere = replace(from_weights.model, weights="/nowhere")
    learner = build_learner(replace(from_weights, model=nowhere), restored=True)
    assert not any(p.is_meta for p in learner.model.parameters())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda small: small.shard(2).unlink(), "model-00002-of-00003.safetensors is missing"),
        (
            lambda small: small.change("norm.weight", lambda t: t * torch.nan),
            "norm.weight in .* holds 64 values that are NaN or infinite",
        ),
    ],
)
def test_bad_weights_are_bad_data(
    from_weights: TrainerConfig, small, spoil: Callable, message: str
) -> None:
    spoil(small)
    config = replace(from_weights, model=replace(from_weights.model, weights=str(small.path)))
    with pytest.raises(DataError, match=message) as caught:
        build_learner(config)
    outcome = failure_outcome(caught.value, step=0)
    assert outcome is not None and outcome.code == ExitCode.BAD_DATA
    assert str(small.path) in outcome.message


def test_a_run_trains_and_resumes_without_its_weights(
    from_weights: TrainerConfig, small, tmp_path: Path
) -> None:
    said: list[str] = []

    def run(config: TrainerConfig, attempt: int) -> None:
        outcome = train(
            config,
            run_dir=tmp_path,
            attempt=attempt,
            ranks=Ranks(),
            resume=attempt > 1,
            say=said.append,
        )
        assert outcome.code == 0, outcome

    config = replace(
        from_weights,
        model=replace(from_weights.model, weights=str(small.path)),
        train=replace(from_weights.train, steps=2),
        eval=replace(from_weights.eval, every=0),
    )
    run(config, 1)
    assert f"starting from the weights in {small.path}" in said
    said.clear()
    small.path.rename(small.path.with_name("elsewhere"))
    run(replace(config, train=replace(config.train, steps=3)), 2)
    assert not any("weights" in line for line in said)
