"""The gated Engram layer against loops in float64, and where its rows' gradients gather."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.engram.layer import Engram
from model.engram.rows import EngramRows, project_rows

M, WIDTH, DIM, COLUMNS = 4, 64, 16, 6


def filled(config) -> Engram:
    own = Engram(config)
    generator = torch.Generator().manual_seed(0)
    for p in own.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.4
    return own


def some_rows(tokens: int, *, distinct: int = 9, seed: int = 1) -> EngramRows:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(distinct, DIM, generator=generator)
    inverse = torch.randint(0, distinct, (1, tokens, COLUMNS), generator=generator)
    return EngramRows(values, inverse, torch.zeros(distinct, DIM))


def slow(
    streams: Tensor, values: Tensor, inverse: Tensor, own: dict[str, Tensor], alive: Tensor
) -> tuple[Tensor, Tensor]:
    out, gates = [], []
    for t in range(len(streams)):
        e = torch.cat([values[i] for i in inverse[0, t].tolist()])
        projected = own["wkv.weight"] @ e
        value, new = projected[M * WIDTH :], []
        for m in range(M):
            key, x = projected[m * WIDTH : (m + 1) * WIDTH], streams[t, m]
            dot = (x * own["q_weight"][m] * own["k_weight"][m] * key).sum()
            dot = dot / x.square().mean().sqrt() / key.square().mean().sqrt() / WIDTH**0.5
            size = torch.clamp(dot.abs(), min=1e-6).sqrt()
            gate = torch.sigmoid(size if dot >= 0 else -size)
            gate = gate if alive[t] else gate * 0
            gates.append(gate)
            new.append(x + gate * value)
        out.append(torch.stack(new))
    return torch.stack(out), torch.stack(gates).view(-1, M)


def test_values_and_every_gradient(make_config: Callable, relative: Callable) -> None:
    own, rows = filled(make_config()), some_rows(12)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, M, WIDTH, generator=generator, requires_grad=True)
    alive = torch.arange(12) % 4 != 3
    weight = torch.randn(12, M, WIDTH, generator=generator)

    found, mean = own(x, rows, alive)
    parameters = dict(own.named_parameters())
    got = torch.autograd.grad((found * weight).sum(), [x, *parameters.values()])
    wide = x.detach().double().requires_grad_()
    leaves = {n: p.detach().double().requires_grad_() for n, p in parameters.items()}
    values = rows.values.double().requires_grad_()
    wanted, gates = slow(wide, values, rows.inverse, leaves, alive)
    exact = torch.autograd.grad((wanted * weight.double()).sum(), [wide, *leaves.values(), values])
    assert relative(found, wanted) < 2e-6
    assert float(mean) == pytest.approx(float(gates[alive].mean().detach()), rel=1e-5)
    assert mean.dtype == torch.float32 and not mean.requires_grad
    assert rows.grad_buffer is not None
    for one, other in zip([*got, rows.grad_buffer], exact, strict=True):
        assert relative(one, other) < 1e-4
    # Both signs of the gate were at work.
    assert gates[alive].min() < 0.4 and gates.max() > 0.6


def test_dead_tokens_are_unchanged_and_give_no_gradient(make_config: Callable) -> None:
    own, rows = filled(make_config()), some_rows(7)
    x = torch.randn(7, M, WIDTH, requires_grad=True)
    found, mean = own(x, rows, torch.zeros(7, dtype=torch.bool))
    assert torch.equal(found, x)
    assert float(mean) == 0.0
    found.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones_like(x))
    assert rows.grad_buffer is not None and not rows.grad_buffer.any()
    assert all(p.grad is not None and not p.grad.any() for p in own.parameters())


def test_the_gate_never_comes_nearer_to_a_half_than_its_clamp(make_config: Callable) -> None:
    own, rows = filled(make_config()), some_rows(5)
    x = torch.randn(5, M, WIDTH, generator=torch.Generator().manual_seed(3), requires_grad=True)
    alive = torch.ones(5, dtype=torch.bool)
    plain = own.q_weight.data.clone()

    def gate_of() -> Tensor:
        projected = project_rows(rows, own.wkv.weight, torch.float32)
        value = projected[:, M * WIDTH :]
        added = own(x, rows, alive)[0] - x
        return (added * value[:, None]).sum(-1) / value.square().sum(-1, keepdim=True)

    signs = torch.sign(gate_of() - 0.5)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    own.q_weight.data = plain * 1e-9  # |dot| far below 1e-6, of either sign
    small = 1 / (1 + math.exp(-1e-3))
    torch.testing.assert_close(
        gate_of(), torch.where(signs > 0, small, 1 - small), rtol=0, atol=2e-6
    )
    found, _ = own(x, rows, alive)
    # In the clamp the gate is constant: only the residual path passes a gradient to x.
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))
    own.q_weight.data = torch.zeros_like(plain)  # no slope of infinity at 0
    grads = torch.autograd.grad(own(x, rows, alive)[0].sum(), [x, *own.parameters()])
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(gate_of(), torch.full((5, M), small), rtol=0, atol=2e-6)


def test_gradients_of_several_micro_batches_add_up_in_the_one_buffer(relative: Callable) -> None:
    generator = torch.Generator().manual_seed(4)
    values, buffer = torch.randn(9, DIM, generator=generator), torch.zeros(9, DIM)
    weight = torch.randn(20, COLUMNS * DIM, generator=generator, requires_grad=True)
    leaf, exact_weight = values.double().requires_grad_(), weight.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for seed in range(3):
        rows = EngramRows(values, some_rows(11, seed=seed).inverse, buffer)
        grad = torch.randn(11, 20, generator=generator)
        out = project_rows(rows, weight, torch.float32)
        exact = leaf[rows.inverse[0]].flatten(1) @ exact_weight.T
        assert relative(out, exact) < 2e-6
        out.backward(grad)
        total = total + (exact * grad.double()).sum()
    total.backward()
    assert leaf.grad is not None and exact_weight.grad is not None and weight.grad is not None
    assert relative(buffer, leaf.grad) < 2e-6
    assert relative(weight.grad, exact_weight.grad) < 2e-6


def test_two_thousand_bf16_ones_add_up_to_2000() -> None:
    """A sum kept in bf16 would stop at 256."""
    values = torch.zeros(1, 1, dtype=torch.bfloat16)
    rows = EngramRows(values, torch.zeros(1, 2000, 1, dtype=torch.int64), torch.zeros(1, 1))
    weight = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    out = project_rows(rows, weight, torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.backward(torch.ones(2000, 1, dtype=torch.bfloat16))
    assert rows.grad_buffer is not None and rows.grad_buffer.tolist() == [[2000.0]]


def test_the_buffer_has_the_same_bits_on_one_and_two_threads(two_threads: None) -> None:
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(3000, 8, generator=generator)
    weight = torch.randn(8, COLUMNS * DIM, generator=generator, requires_grad=True)
    buffers = []
    for threads in (2, 1, 2):
        torch.set_num_threads(threads)
        rows = some_rows(3000, distinct=5)
        project_rows(rows, weight, torch.float32).backward(grad)
        assert rows.grad_buffer is not None
        buffers.append(rows.grad_buffer)
    assert torch.equal(buffers[0], buffers[1]) and torch.equal(buffers[0], buffers[2])


def test_frozen_rows_leave_every_other_gradient_as_it_is() -> None:
    learning = some_rows(12)
    frozen = EngramRows(learning.values, learning.inverse, None)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(5, COLUMNS * DIM, generator=generator, requires_grad=True)
    grads = []
    for rows in (learning, frozen):
        out = project_rows(rows, weight, torch.float32)
        grads += torch.autograd.grad(out.square().sum(), weight)
    assert torch.equal(*grads)


def test_the_concatenated_rows_are_not_kept() -> None:
    kept: list[int] = []

    def note(t: Tensor) -> Tensor:
        kept.append(t.numel())
        return t

    rows = some_rows(500)
    weight = torch.randn(8, COLUMNS * DIM, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        project_rows(rows, weight, torch.float32)
    assert sum(kept) <= weight.numel()
