"""Muon against singular values and against itself taken apart."""

import pytest
import torch

from tests.memory import peak_bytes
from trainer import muon
from trainer.muon import MOMENTUM, Muon, orthogonalised


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 16), (1, 7)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    out = orthogonalised(x * 1e-6)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    assert torch.linalg.svdvals(out).sub(1).abs().max() < 0.05
    assert (out - u @ v).norm() / (u @ v).norm() < 0.05


def test_a_zero_matrix_stays_zero_and_none_at_all_is_well():
    assert orthogonalised(torch.zeros(0, 4, 3)).shape == (0, 4, 3)
    assert torch.equal(orthogonalised(torch.zeros(2, 4, 3)), torch.zeros(2, 4, 3))


def step(weight, momentum, grad, blocks):
    weight = torch.nn.Parameter(weight.clone())
    optimizer = Muon([("w", weight)], [blocks], lr=0.1)
    optimizer.state[weight]["momentum"].copy_(momentum)
    weight.grad = grad
    optimizer.step()
    return weight.detach(), optimizer.state[weight]["momentum"]


@pytest.mark.parametrize("batch_bytes", [1 << 20, 4 * 4 * 8 * 3, 1])
def test_blocks_and_stacked_experts_are_matrices_of_their_own(monkeypatch, batch_bytes):
    monkeypatch.setattr(muon, "BATCH_BYTES", batch_bytes)
    w, m, g = torch.randn(3, 5, 12, 8, generator=torch.Generator().manual_seed(2))
    blocks = (4, 4, 2, 2)
    together, momentum = step(w, m, g, blocks)
    assert torch.equal(momentum, MOMENTUM * m + g)
    for expert in range(5):
        low = 0
        for rows in blocks:
            own = (expert, slice(low, low + rows))
            alone, _ = step(w[own], m[own], g[own], (rows,))
            torch.testing.assert_close(together[own], alone, rtol=1e-5, atol=1e-6)
            low += rows
    whole, _ = step(w, m, g, (12,))
    assert (whole - together).abs().max() > 1e-3


def test_the_size_of_an_update_follows_the_longer_side():
    for shape in ((64, 16), (16, 64)):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        weight, _ = step(torch.zeros(shape), torch.zeros(shape), g, (shape[0],))
        # 16 singular values of 0.1 * 0.18 * sqrt(64).
        assert weight.norm().item() == pytest.approx(0.1 * 0.18 * 8 * 4, rel=0.05)


def test_a_step_holds_a_batch_of_matrices_at_a_time_and_no_more(monkeypatch):
    monkeypatch.setattr(muon, "BATCH_BYTES", 2 * 4 * 64 * 64)
    peaks = []
    for experts in (2, 20):
        weight = torch.nn.Parameter(torch.ones(experts, 64, 64))
        weight.grad = torch.ones_like(weight)
        optimizer = Muon([("w", weight)], [(64,)], lr=0.1)
        optimizer.step()
        peaks.append(peak_bytes(optimizer.step))
    assert peaks[1] <= 1.1 * peaks[0]
