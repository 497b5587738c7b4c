"""What each rank of test_two_ranks runs: one gradient, then training; results go to a file.

Usage: rank_program.py CONFIG.pickle OUT.pt RUN_DIR    (RANK, WORLD_SIZE, MASTER_* set)
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from data.corpus import load_corpus
from data.loader import batches
from model.engram.owners import OwnerStore
from trainer.config import TrainerConfig
from trainer.gradients import gradient_norm, parameter_gradients
from trainer.learner import Learner, build_learner
from trainer.loop import train
from trainer.ranks import Ranks
from trainer.sharding import reduce_islands
from trainer.step import TokenCounts, accumulate


def main() -> None:
    config_file, out, run_dir = map(Path, sys.argv[1:])
    config: TrainerConfig = pickle.loads(config_file.read_bytes())
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = Ranks.from_process_group()
    found: dict[str, object] = {"first": first_gradient(config, ranks)}
    found["norm"] = found["first"].pop("norm")  # type: ignore[attr-defined]
    run_dir.mkdir(exist_ok=True)
    outcome = train(config, run_dir=run_dir, attempt=1, ranks=ranks, resume=False, say=print)
    assert outcome.code == 0, outcome
    if ranks.first:
        torch.save(found, out)
    if ranks.world > 1:
        dist.destroy_process_group()


def first_gradient(config: TrainerConfig, ranks: Ranks) -> dict[str, object]:
    """The whole gradient of the first step by name, tables dense, and its norm, unclipped."""
    learner = build_learner(config)
    corpus = load_corpus(config.data, config.model, seed=config.seed)
    (mine,) = batches(
        corpus.train,
        first_step=0,
        steps=1,
        packs_per_step=config.train.packs_per_step,
        packs_per_micro_batch=config.train.packs_per_micro_batch,
        rank=learner.mesh.dp_index,
        ranks=learner.mesh.dp_size,
        stretch=learner.stretch,
        workers=0,
    )
    tokens, weight = TokenCounts.of(mine, config.model, ranks), config.router.balance_loss_weight
    accumulate(learner, mine, tokens, balance_weight=weight, ranks=ranks)
    reduce_islands(learner.model, ranks)
    tables = learner.store.collect()
    found: dict[str, object] = {
        name: whole(p.grad) for name, p in learner.model.named_parameters() if p.grad is not None
    }
    for layer, (ids, grad) in enumerate(zip(tables.ids, tables.grads, strict=True)):
        assert isinstance(learner.store, OwnerStore)  # frozen tables have no gradient
        dense = torch.zeros_like(learner.store.primary[layer].weight)
        found[f"table {layer}"] = whole(
            learner.store.as_global(layer, dense.index_copy_(0, ids, grad))
        )
    found["norm"] = measured_norm(learner, tables.grads, ranks)
    return found


def measured_norm(learner: Learner, tables: list[Tensor], ranks: Ranks) -> float:
    from trainer.gradients import Gradient

    parts = parameter_gradients(learner.model.parameters(), ranks)
    return gradient_norm([*parts, *(Gradient(g) for g in tables)], ranks)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


if __name__ == "__main__":
    main()
