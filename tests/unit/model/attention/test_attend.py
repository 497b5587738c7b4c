"""Tiled attention against a loop over tokens in float64: values, gradients, cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model.attention.attend import AttentionSettings, attend

pytestmark = pytest.mark.usefixtures("each_way")

HEADS, DIM, ROPE, GROUPS, LORA, OUT = 4, 32, 16, 2, 6, 3


class Problem(NamedTuple):
    q_latent: Tensor
    wq_b: Tensor
    wo_a: Tensor
    kv: Tensor
    sink: Tensor
    entries: Tensor | None
    angles: Tensor
    start: Tensor
    selected: Tensor | None


def starts(lengths: list[int]) -> Tensor:
    """Negative lengths are padding."""
    out: list[int] = []
    for n in lengths:
        low = len(out)
        out += [low] * n if n > 0 else [low + i + 1 for i in range(-n)]
    return torch.tensor(out)


def problem(lengths: list[int], *, chosen: int, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    start = starts(lengths)
    tokens, groups = len(start), 20
    selected = entries = None
    if chosen:
        entries = normal(groups, DIM)
        picks = torch.rand(tokens, groups, generator=generator).argsort(-1)[:, :chosen]
        absent = torch.rand(tokens, chosen, generator=generator) < 0.4
        dead = start > torch.arange(tokens)
        selected = picks.masked_fill(absent | dead[:, None], -1)
    return Problem(
        normal(tokens, LORA),
        normal(HEADS * DIM, LORA) * 0.6,
        normal(GROUPS * OUT, HEADS * DIM // GROUPS),
        normal(tokens, DIM),
        normal(HEADS),
        entries,
        normal(tokens, ROPE // 2) * 3,
        start,
        selected,
    )


def fast(p: Problem, *, window: int, workspace: int) -> Tensor:
    settings = AttentionSettings(
        heads=HEADS, window=window, groups=GROUPS, workspace_bytes=workspace
    )
    out, mass = attend(
        p.q_latent,
        p.wq_b,
        p.wo_a,
        p.kv,
        p.sink,
        turn=torch.polar(torch.ones_like(p.angles), p.angles),
        start=p.start,
        entries=p.entries,
        selected=p.selected,
        settings=settings,
    )
    assert mass is None
    return out


def turn_pairs(x: Tensor, angles: Tensor, sign: int) -> Tensor:
    """The last channels of one token's x [..., d] by angles [n]."""
    a, b = x[..., -ROPE::2], x[..., -ROPE + 1 :: 2]
    cos, sin = angles.cos(), sign * angles.sin()
    pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return torch.cat([x[..., :-ROPE], pairs.flatten(-2)], dim=-1)


def slow(p: Problem, *, window: int) -> Tensor:
    out = []
    for t in range(p.kv.shape[0]):
        q = turn_pairs((p.wq_b @ p.q_latent[t]).view(HEADS, DIM), p.angles[t], 1)
        keys = [p.kv[s] for s in range(t + 1) if s > t - window and s >= p.start[t]]
        if p.selected is not None and p.entries is not None:
            keys += [p.entries[g] for g in p.selected[t].tolist() if g >= 0]
        seen = q.new_zeros(HEADS, DIM)
        if keys:
            key = torch.stack(keys)
            logits = torch.cat([p.sink[:, None], q @ key.T / DIM**0.5], dim=1)
            seen = torch.softmax(logits, dim=1)[:, 1:] @ key
        seen = turn_pairs(seen, p.angles[t], -1).flatten()
        parts = seen.view(GROUPS, -1)
        rows = p.wo_a.view(GROUPS, OUT, -1)
        out.append(torch.cat([rows[g] @ parts[g] for g in range(GROUPS)]))
    return torch.stack(out)


def learned(p: Problem) -> list[Tensor]:
    return [t for t in p[:6] if t is not None]


def prepared(p: Problem, kind: torch.dtype) -> Problem:
    """Leaves of type `kind` that want gradients."""
    learnt = {
        name: None if t is None else t.to(kind).detach().requires_grad_()
        for name, t in zip(Problem._fields[:6], p[:6], strict=True)
    }
    return p._replace(angles=p.angles.to(kind), **learnt)  # type: ignore[arg-type]


LAYOUTS = {
    "documents and padding": [1, 30, -4, 40, 2, -1],
    "one document": [75],
    "starts with padding": [-33, 8, 34],
    "one token": [1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [1, 8, 40])
@pytest.mark.parametrize("chosen", [0, 5])
def test_values_and_gradients(layout: str, window: int, chosen: int, relative: Callable) -> None:
    p = problem(LAYOUTS[layout], chosen=chosen)
    exact = prepared(p, torch.float64)
    wanted = slow(exact, window=window)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9))
    slow_grads = torch.autograd.grad(
        (wanted * weight.double()).sum(), learned(exact), allow_unused=True
    )
    for workspace in (1, 200_000, 1 << 30):
        own = prepared(p, torch.float32)
        found = fast(own, window=window, workspace=workspace)
        assert relative(found, wanted) < 2e-6
        grads = torch.autograd.grad((found * weight).sum(), learned(own))
        for one, other in zip(grads, slow_grads, strict=True):
            assert relative(one, torch.zeros_like(one) if other is None else other) < 1e-5


@pytest.mark.parametrize("layout", ["documents and padding", "one document"])
@pytest.mark.parametrize("window", [1, 8, 40])
@pytest.mark.parametrize("cut", [5, 48])
def test_two_parts_make_the_whole(layout: str, window: int, cut: int, relative: Callable) -> None:
    """The second with the keys before it that its window reaches."""
    p = problem(LAYOUTS[layout], chosen=5)
    whole, parts = prepared(p, torch.float32), prepared(p, torch.float32)
    wanted = fast(whole, window=window, workspace=1 << 20)
    before = min(window - 1, cut)

    def part(low: int, high: int, before: int) -> Tensor:
        own = slice(low, high)
        assert parts.selected is not None
        return fast(
            parts._replace(
                q_latent=parts.q_latent[own],
                kv=parts.kv[low - before : high],
                angles=parts.angles[own],
                start=parts.start[own] - low,
                selected=parts.selected[own],
            ),
            window=window,
            workspace=50_000,
        )

    found = torch.cat([part(0, cut, 0), part(cut, len(p.start), before)])
    assert relative(found, wanted) < 1e-6
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad((found * weight).sum(), learned(parts))
    whole_grads = torch.autograd.grad((wanted * weight).sum(), learned(whole))
    for one, other in zip(grads, whole_grads, strict=True):
        assert relative(one, other) < 1e-5


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient() -> None:
    p = prepared(problem([-40], chosen=3), torch.float32)
    out = fast(p, window=8, workspace=1 << 20)
    assert not out.any()
    grads = torch.autograd.grad(out.sum(), learned(p))
    assert all(not g.any() for g in grads)


def test_the_sink_is_in_the_denominator_only() -> None:
    p = problem([9], chosen=0)
    low, high = (p._replace(sink=torch.full((HEADS,), v)) for v in (-1e4, 1e4))
    plain = slow(prepared(low, torch.float64), window=4)
    found = fast(low, window=4, workspace=1 << 20)
    torch.testing.assert_close(found.double(), plain.detach(), rtol=1e-5, atol=1e-5)
    # A sink that takes all the weight leaves nothing; it has no value of its own.
    assert not fast(high, window=4, workspace=1 << 20).any()


def test_absent_entries_take_no_gradient_of_row_zero() -> None:
    p = problem([12], chosen=4)
    assert p.selected is not None
    nothing = p._replace(selected=torch.full_like(p.selected, -1))
    own = prepared(nothing, torch.float32)
    out = fast(own, window=4, workspace=1 << 20)
    assert torch.equal(out, fast(nothing._replace(entries=p.entries), window=4, workspace=1 << 20))
    without = fast(nothing._replace(entries=None, selected=None), window=4, workspace=1 << 20)
    torch.testing.assert_close(out, without)
    assert own.entries is not None
    (grad,) = torch.autograd.grad(out.sum(), own.entries)
    assert not grad.any()


def test_a_document_gives_the_same_bits_whatever_stands_before_it() -> None:
    p = problem([30, 40], chosen=4)
    other = problem([30, 40], chosen=4, seed=1)

    def swapped(mine: Tensor, theirs: Tensor) -> Tensor:
        return torch.cat([theirs[:30], mine[30:]])

    q = p._replace(q_latent=swapped(p.q_latent, other.q_latent), kv=swapped(p.kv, other.kv))
    one, two = (fast(x, window=8, workspace=1 << 20) for x in (p, q))
    assert torch.equal(one[30:], two[30:])
    assert not torch.equal(one[:30], two[:30])


def test_bf16_inputs_keep_their_type_and_accuracy(relative: Callable) -> None:
    p = prepared(problem([30, 40], chosen=4), torch.bfloat16)
    p = p._replace(angles=p.angles.float())
    found = fast(p, window=8, workspace=1 << 20)
    assert found.dtype == torch.bfloat16
    exact = prepared(p, torch.float64)
    wanted = slow(exact, window=8)
    assert relative(found, wanted) < 1e-2
    grads = torch.autograd.grad(found.float().sum(), learned(p))
    slow_grads = torch.autograd.grad(wanted.sum(), learned(exact))
    for one, other in zip(grads, slow_grads, strict=True):
        assert one.dtype == torch.bfloat16
        assert relative(one, other) < 3e-2


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


def cost(tokens: int) -> tuple[int, int]:
    """Forward and backward: floating-point operations, numbers of the largest tensor."""
    p = prepared(problem([tokens], chosen=4), torch.float32)
    counter, largest = FlopCounterMode(display=False), Largest()
    with counter, largest:
        fast(p, window=32, workspace=1 << 20).sum().backward()
    return counter.get_total_flops(), largest.numel


def test_cost_and_memory_grow_linearly_with_tokens() -> None:
    (flops, numel), (flops_2, numel_2) = cost(1024), cost(2048)
    assert flops > 1024 * HEADS * 32 * DIM
    assert flops_2 == pytest.approx(2 * flops, rel=0.02)
    assert numel_2 <= 2.05 * numel
    assert numel_2 < HEADS * 2048 * 2048 // 64
