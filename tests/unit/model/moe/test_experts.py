"""Experts against a loop over tokens in float64, clamps and their gradients included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.moe.experts import Experts, MoE, SharedExpert
from model.moe.router import Routing

pytestmark = pytest.mark.usefixtures("each_way")

WIDTH, INNER = 64, 32


def one_expert(x: Tensor, w13: Tensor, w2: Tensor, weight: Tensor | float, limit: float) -> Tensor:
    """w2 (silu(min(gate, limit)) * clamp(up, -limit, limit) * weight), by autograd's own rules."""
    gate, up = w13[: len(w13) // 2] @ x, w13[len(w13) // 2 :] @ x
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return w2 @ (gate / (1 + torch.exp(-gate)) * up * weight)


def slow(
    x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, experts: Tensor, limit: float
) -> Tensor:
    out = []
    for t in range(len(x)):
        total = x.new_zeros(x.shape[1])
        for j, e in enumerate(experts[t].tolist()):
            if e < len(w13):
                total = total + one_expert(x[t], w13[e], w2[e], weights[t, j], limit)
        out.append(total)
    return torch.stack(out)


def filled(module: torch.nn.Module, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator) * scale


def routing(tokens: int, k: int, experts: int, *, among: list[int]) -> Routing:
    """Choices among some experts; every fifth token is padding."""
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(tokens, len(among), generator=generator).argsort(-1)[:, :k]
    chosen = torch.tensor(among)[order]
    chosen[4::5] = experts
    counts = torch.bincount(chosen.flatten(), minlength=experts + 1)[None, :experts]
    weights = torch.rand(tokens, k, generator=generator) + 0.1
    return Routing(chosen, weights.requires_grad_(), counts)


@pytest.mark.parametrize("limit", [0.7, 10.0])
@pytest.mark.parametrize("among", [[0, 1, 2, 3, 4, 5, 6, 7], [1, 6], [3, 7, 0]])
def test_routed_experts(
    make_config: Callable, relative: Callable, limit: float, among: list[int]
) -> None:
    own = Experts(make_config(swiglu_limit=limit))
    filled(own)
    choice = routing(37, 2, 8, among=among)
    x = torch.randn(37, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    grad = torch.randn(37, WIDTH, generator=torch.Generator().manual_seed(3))

    leaves = [x, choice.weights, own.w13, own.w2]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = slow(wide[0], wide[1], wide[2], wide[3], choice.experts, limit)
    exact = torch.autograd.grad((wanted * grad.double()).sum(), wide)
    if limit < 1:
        both = torch.einsum("td,eid->tei", x, own.w13)
        assert (both.abs() > limit).float().mean() > 0.5, "the clamps must be at work"
    for workspace in (1, 60_000, 1 << 30):
        own.workspace_bytes = workspace
        found = own(x, choice)
        assert relative(found, wanted) < 2e-6
        assert not found[4::5].any()
        got = torch.autograd.grad((found * grad).sum(), leaves)
        for one, other in zip(got, exact, strict=True):
            assert relative(one, other) < 5e-6
        idle = [e for e in range(8) if e not in among]
        assert not got[2][idle].any() and not got[3][idle].any()


def test_the_workspace_does_not_change_a_bit(make_config: Callable) -> None:
    own = Experts(make_config())
    filled(own)
    choice = routing(90, 2, 8, among=list(range(8)))
    x = torch.randn(90, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    results = []
    for workspace in (1, 60_000, 1 << 30):
        own.workspace_bytes = workspace
        out = own(x, choice)
        grads = torch.autograd.grad(out.square().sum(), [x, choice.weights, own.w13, own.w2])
        results.append([out, *grads])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("beside", [0, 1, 2, 3, 7, 14, 15, 16, 40])
def test_a_token_keeps_its_bits_however_many_share_its_expert(
    make_config: Callable, beside: int
) -> None:
    own = Experts(make_config())
    filled(own)
    x = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(2))
    grad = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(3))

    def run(tokens: int) -> tuple[Tensor, Tensor]:
        part = x[:tokens].clone().requires_grad_()
        experts = torch.zeros(tokens, 1, dtype=torch.int64)
        counts = torch.tensor([[tokens] + [0] * 7, [0] * 8])
        out = own(part, Routing(experts, torch.full((tokens, 1), 0.7), counts))
        (by_x,) = torch.autograd.grad((out * grad[:tokens]).sum(), part)
        return out[0], by_x[0]

    (out, by_x), (wide_out, wide_by_x) = run(1 + beside), run(60)
    assert torch.equal(out, wide_out)
    assert torch.equal(by_x, wide_by_x)


def test_all_padding(make_config: Callable) -> None:
    own = Experts(make_config())
    filled(own)
    experts = torch.full((6, 2), 8)
    weights = torch.ones(6, 2, requires_grad=True)
    x = torch.randn(6, WIDTH, requires_grad=True)
    out = own(x, Routing(experts, weights, torch.zeros(2, 8, dtype=torch.int64)))
    grads = torch.autograd.grad(out.sum(), [x, weights, own.w13, own.w2])
    assert not out.any() and all(not g.any() for g in grads)


def clamp_gradients(module: Callable[[Tensor], Tensor], value: float, channel: int) -> float:
    """d output / d input where channel's pre-activation is `value` and its partner's is 1."""
    x = torch.zeros(1, WIDTH)
    x[0, [0, 1]] = 1.0
    x[0, channel] = value
    x.requires_grad_()
    (grad,) = torch.autograd.grad(module(x)[0, 0], x)
    return float(grad[0, channel])


@pytest.mark.parametrize("kind", ["shared", "routed"])
def test_a_clamped_value_passes_no_gradient_and_one_at_the_limit_does(
    make_config: Callable, kind: str
) -> None:
    config = make_config(swiglu_limit=2.0)
    shared, routed = SharedExpert(config), Experts(config)
    # Pre-activations are inputs: gate 0 is channel 0, up 0 is channel 1; output 0 is act 0.
    w13, w2 = torch.zeros(2 * INNER, WIDTH), torch.zeros(WIDTH, INNER)
    w13[0, 0] = w13[INNER, 1] = w2[0, 0] = 1.0
    shared.w13.weight.data, shared.w2.weight.data = w13, w2
    routed.w13.data, routed.w2.data = w13.repeat(8, 1, 1), w2.repeat(8, 1, 1)
    choice = Routing(
        torch.tensor([[3]]), torch.ones(1, 1), torch.eye(8, dtype=torch.int64)[None, 3]
    )

    def run(x: Tensor) -> Tensor:
        return shared(x) if kind == "shared" else routed(x, choice)

    def silu(v: float) -> float:
        return v / (1 + torch.tensor(-v).exp().item())

    gate, up = 0, 1
    beyond = 2.0 + 1e-6 * 2
    assert clamp_gradients(run, beyond, gate) == 0.0
    assert clamp_gradients(run, 50.0, gate) == 0.0
    assert clamp_gradients(run, 2.0, gate) > 1.0
    assert clamp_gradients(run, -50.0, gate) == pytest.approx(0.0, abs=1e-6)
    assert clamp_gradients(run, -3.0, gate) == pytest.approx(-0.0881, abs=1e-3)  # no lower clamp
    for value in (beyond, -beyond, 50.0, -50.0):
        assert clamp_gradients(run, value, up) == 0.0
    for value in (2.0, -2.0, 0.5):
        assert clamp_gradients(run, value, up) == pytest.approx(silu(1.0))

    x = torch.zeros(1, WIDTH)
    for g, u in ((50.0, 50.0), (50.0, -50.0), (-50.0, 1.0), (1.0, -1.5)):
        x[0, gate], x[0, up] = g, u
        wanted = silu(min(g, 2.0)) * max(-2.0, min(u, 2.0))
        assert float(run(x).detach()[0, 0]) == pytest.approx(wanted, abs=1e-6)


def test_shared_expert(make_config: Callable, relative: Callable) -> None:
    own = SharedExpert(make_config(swiglu_limit=0.7))
    filled(own)
    x = torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(2), requires_grad=True)
    leaves = [x, own.w13.weight, own.w2.weight]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.stack([one_expert(row, wide[1], wide[2], 1.0, 0.7) for row in wide[0]])
    weight = torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(3))
    found = own(x)
    assert relative(found, wanted) < 2e-6
    got = torch.autograd.grad((found * weight).sum(), leaves)
    exact = torch.autograd.grad((wanted * weight.double()).sum(), wide)
    for one, other in zip(got, exact, strict=True):
        assert relative(one, other) < 5e-6


def test_padding_passes_the_shared_expert_alone(make_config: Callable) -> None:
    own = MoE(make_config())
    filled(own)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    live = torch.tensor([True, False, True, True, False, True])
    out, counts, *_ = own(x, live, torch.zeros(6, dtype=torch.bool))
    shared = own.shared_experts(x)
    assert torch.equal(out[~live], shared[~live])
    assert (out[live] != shared[live]).any(1).all()
    assert int(counts.sum()) == 4 * 2


def test_bf16_sums_choices_in_fp32_and_rounds_twice(
    make_config: Callable, relative: Callable
) -> None:
    own = MoE(make_config())
    filled(own)
    x = torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    live, image = torch.ones(30, dtype=torch.bool), torch.zeros(30, dtype=torch.bool)
    out, *_ = own(x, live, image)
    routed = own.experts(x, own.gate(x, live, image))
    assert out.dtype == routed.dtype == torch.bfloat16
    assert torch.equal(out, routed + own.shared_experts(x))
    exact, *_ = own(x.float(), live, image)
    assert relative(out, exact) < 1e-2
