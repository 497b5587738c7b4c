"""Sinkhorn-balanced momentum: a plain dense reference in float64, tiles, touched rows."""

import pytest
import torch

from model.config import ModelConfig
from model.engram.owners import OwnerStore
from trainer import sinkhorn
from trainer.sinkhorn import sinkhorn_step


def reference(weight, momentum, grad, lr):
    """The rule as it is written, whole matrices in float64."""
    w, m, g = weight.double(), momentum.double(), grad.double()
    m = 0.95 * m + 0.05 * g
    u = 0.95 * m + 0.05 * g
    size = u.norm(dim=1)
    u[size <= 1e-3 * size.mean()] = 0
    for turn in range(11):
        u = u / (u.norm(dim=1 - turn % 2, keepdim=True) + 1e-20)
    return w - 0.18 * lr * u.shape[1] ** 0.5 * u, m


def problem(rows=50, columns=12):
    random = torch.Generator().manual_seed(4)
    w, m, g = torch.randn(3, rows, columns, generator=random)
    scale = torch.logspace(-6, 0, rows)[:, None]  # some rows fall below the threshold
    return w, m * scale * 1e-4, g * scale * 1e-4


@pytest.mark.parametrize("tile_values", [1 << 22, 60])
def test_equals_the_dense_rule_whatever_the_tiles(monkeypatch, tile_values):
    monkeypatch.setattr(sinkhorn, "HOST_VALUES", tile_values)
    w, m, g = problem()
    wanted, momentum = reference(w, m, g, 0.1)
    moved = w.clone()
    sinkhorn_step(moved, m, g, lr=0.1)
    change = wanted - w
    assert (moved - w - change).norm() / change.norm() < 1e-5
    assert (m - momentum).norm() / momentum.norm() < 1e-6
    still = (change == 0).all(1)
    assert 0 < still.sum() < len(w)
    assert torch.equal(moved[still], w[still])


@pytest.mark.parametrize("tile_values", [1 << 22, 60])
def test_touched_rows_equal_a_gradient_that_is_zero_elsewhere(monkeypatch, tile_values):
    monkeypatch.setattr(sinkhorn, "HOST_VALUES", tile_values)
    w, m, g = problem()
    ids = torch.tensor([0, 4, 5, 19, 20, 49])
    dense = torch.zeros_like(g).index_copy(0, ids, g[ids])
    one, two, m_one, m_two = w.clone(), w.clone(), m.clone(), m.clone()
    sinkhorn_step(one, m_one, dense, lr=0.1)
    sinkhorn_step(two, m_two, g[ids], lr=0.1, ids=ids)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-7)
    torch.testing.assert_close(m_one, m_two, rtol=1e-6, atol=0)


def test_nothing_moves_without_a_gradient():
    w = torch.randn(6, 4)
    moved = w.clone()
    sinkhorn_step(moved, torch.zeros(6, 4), torch.zeros(6, 4), lr=1.0)
    assert torch.equal(moved, w)


def test_tables_learn_layer_by_layer(config):
    from trainer.table_optim import SinkhornTables

    model: ModelConfig = config.model
    store = OwnerStore(model, seed=0)
    before = [w.clone() for w in store.weight]
    tables = SinkhornTables(store)
    ids = [torch.tensor([1, 7]) for _ in store.layers]
    grads = [torch.randn(2, model.engram_head_dim) * (n + 1) for n in range(len(ids))]
    tables.step(ids, grads, lr=0.1)
    for weight, old, grad, layer in zip(store.weight, before, grads, store.layers, strict=True):
        dense = torch.zeros_like(old).index_copy(0, ids[0], grad)
        wanted, momentum = reference(old, torch.zeros_like(old), dense, 0.1)
        torch.testing.assert_close(weight, wanted.float(), rtol=0, atol=1e-6)
        held = tables.tensors()[f"layers.{layer}.engram.embed/momentum"]
        torch.testing.assert_close(held, momentum.float(), rtol=1e-5, atol=1e-12)
