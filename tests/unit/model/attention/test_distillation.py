"""The divergence between index scores and attention: against dense autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention.distillation import selection_divergence

HEADS, DIM = 3, 8


class Problem(NamedTuple):
    q: Tensor
    weights: Tensor
    keys: Tensor
    selected: Tensor
    mass: Tensor


def problem(tokens: int, *, chosen: int, groups: int = 20, seed: int = 0) -> Problem:
    """Some entries absent, some without mass; token 1 selects nothing, token 2 has no mass."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(tokens, groups, generator=generator).argsort(-1)[:, :chosen]
    absent = torch.rand(tokens, chosen, generator=generator) < 0.3
    absent[1:2] = True
    selected = picks.masked_fill(absent, -1)
    mass = torch.rand(tokens, chosen, generator=generator).masked_fill(absent, 0.0)
    mass[torch.rand(tokens, chosen, generator=generator) < 0.1] = 0.0
    mass[2:3] = 0.0
    return Problem(
        torch.randn(tokens, HEADS, DIM, generator=generator),
        torch.randn(tokens, HEADS, generator=generator),
        torch.randn(groups, DIM, generator=generator),
        selected,
        mass,
    )


def dense(p: Problem) -> Tensor:
    """All scores at once, [T, G], the rest masked out: one query after the other."""
    scores = (torch.einsum("thd,gd->thg", p.q, p.keys).relu() * p.weights[..., None]).sum(1)
    loss = p.q.new_zeros(())
    for t in range(len(p.q)):
        places = [(k, g) for k, g in enumerate(p.selected[t].tolist()) if g >= 0]
        total = sum(float(p.mass[t, k]) for k, _ in places)
        if total == 0:
            continue
        log_p = torch.log_softmax(scores[t, [g for _, g in places]], dim=0)
        for (k, _), own in zip(places, log_p, strict=True):
            target = float(p.mass[t, k]) / total
            if target > 0:
                loss = loss + target * (torch.tensor(target).double().log() - own)
    return loss


def leaves(p: Problem, kind: torch.dtype) -> Problem:
    q, weights, keys = (t.to(kind).requires_grad_() for t in p[:3])
    return p._replace(q=q, weights=weights, keys=keys, mass=p.mass.double())


@pytest.mark.parametrize("workspace", [1, 9_000, 1 << 24])
@pytest.mark.parametrize("chosen", [1, 6, 20])
def test_value_and_gradients(workspace: int, chosen: int, relative: Callable) -> None:
    p = problem(30, chosen=chosen)
    exact, own = leaves(p, torch.float64), leaves(p, torch.float32)
    wanted = dense(exact)
    found = selection_divergence(*own[:4], p.mass, workspace_bytes=workspace)
    assert found.dtype == torch.float32
    assert relative(found, wanted) < 1e-6
    assert float(found.detach()) > 0 or chosen == 1
    slow = torch.autograd.grad(3 * wanted, exact[:3])
    fast = torch.autograd.grad(3 * found, own[:3])
    for one, other in zip(fast, slow, strict=True):
        # With one entry each the softmax is 1 and nothing can be learnt.
        assert relative(one, other) < 2e-6 or (chosen == 1 and not one.any())
    assert not fast[0][1:3].any() and not fast[1][1:3].any()


def test_nothing_selected_or_no_mass_anywhere_is_zero() -> None:
    p = problem(8, chosen=4)
    for selected, mass in (
        (torch.full_like(p.selected, -1), torch.zeros_like(p.mass)),
        (p.selected, torch.zeros_like(p.mass)),
    ):
        own = leaves(p, torch.float32)
        loss = selection_divergence(*own[:3], selected, mass, workspace_bytes=1 << 20)
        grads = torch.autograd.grad(loss, own[:3])
        assert not loss
        assert all(not g.any() for g in grads)


def test_scores_that_match_the_target_are_at_rest() -> None:
    """One head, non-negative products: the mass is made the softmax of the scores."""
    generator = torch.Generator().manual_seed(1)
    q, keys = (torch.rand(n, 1, DIM, generator=generator) for n in (5, 7))
    weights, selected = torch.ones(5, 1), torch.arange(7).expand(5, 7)
    mass = torch.softmax(q[:, 0] @ keys[:, 0].T, dim=-1) * 2.5
    own = q.requires_grad_(), weights.requires_grad_(), keys[:, 0].clone().requires_grad_()
    loss = selection_divergence(*own, selected, mass, workspace_bytes=1 << 20)
    assert loss.detach().abs() < 1e-6
    assert all(float(g.abs().max()) < 1e-6 for g in torch.autograd.grad(loss, own))


def test_bf16_inputs(relative: Callable) -> None:
    p = problem(30, chosen=6)
    own, exact = leaves(p, torch.bfloat16), leaves(p, torch.float64)
    found = selection_divergence(*own[:4], p.mass, workspace_bytes=1 << 20)
    assert found.dtype == torch.float32
    assert relative(found, dense(exact)) < 2e-2
    slow = torch.autograd.grad(dense(exact), exact[:3])
    for one, other in zip(torch.autograd.grad(found, own[:3]), slow, strict=True):
        assert one.dtype == torch.bfloat16
        assert relative(one, other) < 5e-2


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


def test_temporaries_fit_the_workspace() -> None:
    p = problem(512, chosen=16)
    own = leaves(p, torch.float32)
    with Largest() as mode:
        loss = selection_divergence(*own[:4], p.mass, workspace_bytes=20_000)
        loss.backward()
    # Nothing but what has the inputs' shapes is longer than the workspace; q is the largest.
    assert mode.numel == own.q.numel() < 512 * 16 * HEADS
    assert mode.numel < 512 * 16 * DIM // 4
