"""What `dsv41 plan` says each rank will hold is what the ranks then hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from torch import Tensor

from launcher.plan.holdings import Holdings, holdings
from model.engram.owners import OwnerStore
from model.parallel.held import held_part
from tests.builders import trainer_config
from tests.ranks import Ranks
from trainer.config import ParallelConfig, TrainerConfig
from trainer.learner import build_learner
from trainer.optim import optimizer_tensors

pytestmark = pytest.mark.xdist_group("ranks")


def size(tensors: list[Tensor]) -> int:
    parts = [held_part(tensor)[0] for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def held(config: TrainerConfig) -> dict[str, int]:
    """Bytes of this rank by class."""
    learner = build_learner(config)
    model, store, tables = learner.model, learner.store, learner.table_optimizer
    assert isinstance(store, OwnerStore) and tables is not None
    parameters = list(model.parameters())
    return {
        "parameters": size([*parameters, *model.buffers()]),
        "gradients": size([p for p in parameters if p.requires_grad]),
        "optimiser": size(list(optimizer_tensors(learner.optimizer).values())),
        "Engram rows": size(store.weight),
        "Engram optimiser": size(list(tables.tensors().values())),
    }


def told(plan: Holdings, rank: int) -> dict[str, int]:
    return {c.name: int(c.bytes[rank]) for c in plan.classes if not (c.estimate or c.note)}


@pytest.mark.parametrize(("rule", "name"), [("adamw", "auto"), ("pretrain", "rowwise_adagrad")])
def test_one_rank(tmp_path: Path, rule: str, name: str) -> None:
    config = trainer_config(tmp_path)
    optim = dataclasses.replace(config.optim, name=rule, tables=name)
    config = dataclasses.replace(config, optim=optim)
    plan = holdings(config)
    assert told(plan, 0) == held(config)
    learner = build_learner(config)
    assert plan.checkpoint_bytes == size(list(learner.tensors().values()))
    assert plan.table_values == sum(w.numel() for w in learner.store.weight)  # pyright: ignore


MESHES = {
    "replicas": ParallelConfig(dp_replicate=2, dp_shard=2, engram_owners=2),
    "experts divided twice": ParallelConfig(dp_shard=2, cp=2, ep=2),
}


@pytest.mark.parametrize("parallel", MESHES.values(), ids=MESHES)
def test_four_ranks(ranks: Ranks, tmp_path: Path, parallel: ParallelConfig) -> None:
    config = trainer_config(tmp_path, parallel=parallel)
    odd = dataclasses.replace(config.model, vocab_size=config.model.vocab_size + 1)
    config = dataclasses.replace(config, model=odd)
    plan, alone = holdings(config), holdings(dataclasses.replace(config, parallel=ParallelConfig()))
    found = ranks.run(4, held, config)
    assert [told(plan, rank) for rank in range(4)] == found
    assert plan.checkpoint_bytes == alone.checkpoint_bytes
