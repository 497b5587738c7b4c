"""Rules for tables against plain loops over rows; what they need of memory; frozen tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from data.batch import Batch
from data.corpus import load_corpus
from data.loader import batches
from model.engram.owners import OwnerStore
from model.parallel.mesh import Mesh
from tests.memory import peak_bytes
from trainer import sinkhorn, table_optim
from trainer.config import TrainerConfig
from trainer.learner import build_learner
from trainer.ranks import Ranks
from trainer.step import StepSettings, train_step
from trainer.table_optim import RowwiseAdagrad, SinkhornTables, SparseAdam

ROWS, DIM, LR = 40, 6, 0.1


def store_of(*weights: Tensor) -> Any:
    """What a rule needs of a store that holds these tables alone."""
    layers = tuple(range(1, len(weights) + 1))
    primary = [
        SimpleNamespace(layer=n, low=0, weight=w) for n, w in zip(layers, weights, strict=True)
    ]
    return SimpleNamespace(
        layers=layers, primary=primary, mesh=Mesh(), as_global=lambda index, tensor: tensor
    )


def reads(steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Some distinct rows and their gradients a step; one step reads nothing."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for step in range(steps):
        count = 0 if step == 2 else 9
        ids = torch.randperm(ROWS, generator=random)[:count].sort().values
        scale = torch.logspace(-4, 0, count)[:, None]
        found.append((ids, torch.randn(count, DIM, generator=random) * scale))
    return found


def adam_by_loop(weight: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    w, count = weight.double().tolist(), [0] * ROWS
    first, second = ([[0.0] * DIM for _ in w] for _ in range(2))
    for ids, grads in steps:
        for row, grad in zip(ids.tolist(), grads.double().tolist(), strict=True):
            count[row] += 1
            for j, g in enumerate(grad):
                first[row][j] = 0.9 * first[row][j] + 0.1 * g
                second[row][j] = 0.95 * second[row][j] + 0.05 * g * g
                m = first[row][j] / (1 - 0.9 ** count[row])
                v = second[row][j] / (1 - 0.95 ** count[row])
                w[row][j] -= LR * m / (math.sqrt(v) + 1e-8)
    return torch.tensor(w, dtype=torch.float64)


def adagrad_by_loop(weight: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    w, total = weight.double().tolist(), [0.0] * ROWS
    for ids, grads in steps:
        for row, grad in zip(ids.tolist(), grads.double().tolist(), strict=True):
            total[row] += sum(g * g for g in grad) / DIM
            for j, g in enumerate(grad):
                w[row][j] -= LR * g / (math.sqrt(total[row]) + 1e-8)
    return torch.tensor(w, dtype=torch.float64)


RULES = {
    "sparse_adam": (lambda s: SparseAdam(s, beta1=0.9, beta2=0.95, eps=1e-8), adam_by_loop),
    "rowwise_adagrad": (lambda s: RowwiseAdagrad(s, eps=1e-8), adagrad_by_loop),
}


@pytest.mark.parametrize("tile_values", [1 << 18, 4 * DIM])
@pytest.mark.parametrize("rule", RULES)
def test_rows_learn_as_by_hand(monkeypatch, rule, tile_values):
    monkeypatch.setattr(table_optim, "TILE_VALUES", tile_values)
    make, by_loop = RULES[rule]
    start = torch.randn(2, ROWS, DIM, generator=torch.Generator().manual_seed(1))
    weights = list(start.clone())
    optimizer = make(store_of(*weights))
    steps = [reads(5, seed) for seed in (2, 3)]
    for (ids, grads), (others, more) in zip(*steps, strict=True):
        optimizer.step([ids, others], [grads, more], lr=LR)
    for weight, before, layer in zip(weights, start, steps, strict=True):
        wanted = by_loop(before, layer) - before
        assert (weight - before - wanted).norm() <= 1e-5 * wanted.norm()
        read = torch.cat([ids for ids, _ in layer]).unique()
        still = torch.ones(ROWS, dtype=torch.bool).index_fill(0, read, False)
        assert still.any()
        assert torch.equal(weight[still], before[still])


def test_state_is_named_by_layer_and_has_its_size():
    store = store_of(torch.zeros(ROWS, DIM))
    adam = SparseAdam(store, beta1=0.9, beta2=0.95, eps=1e-8).tensors()
    assert {n: (tuple(t.shape), t.dtype) for n, t in adam.items()} == {
        "layers.1.engram.embed/exp_avg": ((ROWS, DIM), torch.float32),
        "layers.1.engram.embed/exp_avg_sq": ((ROWS, DIM), torch.float32),
        "layers.1.engram.embed/steps": ((ROWS,), torch.int32),
    }
    adagrad = RowwiseAdagrad(store, eps=1e-8).tensors()
    assert {n: tuple(t.shape) for n, t in adagrad.items()} == {
        "layers.1.engram.embed/sum_sq": (ROWS,)
    }


@pytest.mark.parametrize("rule", RULES)
def test_a_step_needs_memory_for_rows_it_has_read_and_no_more(rule):
    make, _ = RULES[rule]
    peaks = []
    for rows, read in ((50_000, 20_000), (200_000, 20_000), (200_000, 200)):
        optimizer = make(store_of(torch.zeros(rows, 64)))
        ids = torch.arange(0, rows, rows // read)
        grads = torch.ones(len(ids), 64)
        optimizer.step([ids[:1]], [grads[:1]], lr=LR)
        peaks.append(peak_bytes(lambda o=optimizer, i=ids, g=grads: o.step([i], [g], lr=LR)))
    many, larger, few = peaks
    assert 0 < few < many / 5
    assert larger == many
    assert many <= 6 * 4 * table_optim.TILE_VALUES


def test_whole_tables_learn_without_a_second_table_in_memory():
    table = torch.zeros(200_000, 64)
    optimizer = SinkhornTables(store_of(table))
    ids, grads = torch.arange(0, 200_000, 100), torch.ones(2000, 64)
    peak = peak_bytes(lambda: optimizer.step([ids], [grads], lr=LR))
    assert peak <= 4 * 4 * len(table) + 4 * 4 * sinkhorn.HOST_VALUES
    assert peak < 0.2 * table.nbytes


@pytest.mark.parametrize("rule", ["sinkhorn", "sparse_adam", "rowwise_adagrad", "frozen"])
def test_a_run_learns_its_tables_by_the_rule_asked_for(config, rule):
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, tables=rule))
    learner = build_learner(config)
    assert isinstance(learner.store, OwnerStore)
    before = [t.weight.clone() for t in learner.store.primary]
    seen = []
    forward = learner.model.forward

    def spy(*args, engram, **options):
        seen.extend(engram)
        return forward(*args, engram=engram, **options)

    learner.model.forward = spy
    split = some_batches(config)
    train_step(learner, split, StepSettings(1e-3, 1e-2, 1.0), ranks=Ranks())
    moved = [
        (w.weight != b).any(1).sum() for w, b in zip(learner.store.primary, before, strict=True)
    ]
    state = [name for name in learner.tensors() if name.startswith("table_optimizer/")]
    if rule == "frozen":
        assert not state
        assert not any(moved)
        assert all(rows.grad_buffer is None for rows in seen)
    else:
        assert state
        assert all(moved)
        assert all(rows.grad_buffer is not None for rows in seen)
    assert len(seen) == len(split) * len(before) > 0


def some_batches(config: TrainerConfig) -> Sequence[Batch]:
    corpus = load_corpus(config.data, config.model, seed=config.seed)
    sizes: dict[str, Any] = {"packs_per_step": 2, "packs_per_micro_batch": 1}
    return next(
        iter(batches(corpus.train, first_step=0, steps=1, rank=0, ranks=1, workers=0, **sizes))
    )
