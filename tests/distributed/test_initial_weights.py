"""Ranks that each make their own part of the initial model have made the model of one rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.parallel.held import held_part
from tests.builders import trainer_config
from tests.ranks import Ranks
from trainer.config import ParallelConfig, TrainerConfig
from trainer.learner import build_learner

pytestmark = pytest.mark.xdist_group("ranks")

MESHES = {
    "one owner": ParallelConfig(dp_shard=2, engram_owners=1),
    "replicas": ParallelConfig(dp_replicate=2, dp_shard=2, engram_owners=2),
    "experts divided twice": ParallelConfig(dp_shard=2, cp=2, ep=2),
}


def tensors(config: TrainerConfig) -> dict[str, Tensor]:
    model = build_learner(config).model
    return {n: p.detach() for n, p in [*model.named_parameters(), *model.named_buffers()]}


def differences(config: TrainerConfig, alone: TrainerConfig) -> tuple[list[str], int]:
    """Names of tensors that are not those of one rank, or not the same on all ranks, to the last
    bit; and how many values this rank holds."""
    mine, whole = tensors(config), tensors(alone)
    assert mine.keys() == whole.keys()
    wrong, held = [], 0
    for name, tensor in mine.items():
        held += held_part(tensor)[0].numel()
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
        copies = [torch.empty_like(full) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, full.contiguous())
        if not all(torch.equal(copy, whole[name]) for copy in copies):
            wrong.append(name)
    return wrong, held


@pytest.mark.parametrize("parallel", MESHES.values(), ids=MESHES)
def test_the_ranks_hold_the_model_of_one(
    ranks: Ranks, tmp_path: Path, parallel: ParallelConfig
) -> None:
    config = trainer_config(tmp_path, parallel=parallel)
    odd = dataclasses.replace(config.model, vocab_size=config.model.vocab_size + 1)
    config = dataclasses.replace(config, model=odd)  # embedding and head divide unevenly
    alone = dataclasses.replace(config, parallel=ParallelConfig())
    whole = sum(t.numel() for t in tensors(alone).values())
    for wrong, held in ranks.run(parallel.world, differences, config, alone):
        assert wrong == []
        assert held < 1.4 * whole / (
            parallel.dp_shard * parallel.cp
        )  # islands are whole on every rank
