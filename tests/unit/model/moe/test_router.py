"""The router against python numbers and autograd in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.moe.router import Router


def filled(config, seed: int = 0) -> Router:
    own = Router(config)
    generator = torch.Generator().manual_seed(seed)
    own.weight.data = torch.randn(own.weight.shape, generator=generator) * 0.3
    own.bias.copy_(torch.randn(own.bias.shape, generator=generator))
    own.bias_vl.copy_(torch.randn(own.bias_vl.shape, generator=generator))
    return own


def slow(own: Router, x: Tensor, live: Tensor, image: Tensor) -> tuple[list, list, list]:
    """Experts and weights as {expert: weight} of each token, and counts by modality."""
    chosen, counts = [], [[0] * own.experts, [0] * own.experts]
    for t in range(len(x)):
        z = (own.weight.double() @ x[t].double()).tolist()
        s = [math.sqrt(math.log1p(math.exp(v))) for v in z]
        bias = (own.bias_vl if image[t] else own.bias).tolist()
        order = sorted(range(own.experts), key=lambda e: -(s[e] + bias[e]))[: own.k]
        total = sum(s[e] for e in order) + 1e-20
        chosen.append({e: s[e] / total * own.scaling for e in order})
        for e in order:
            counts[int(image[t])][e] += bool(live[t])
    return chosen, counts, [sorted(c) for c in chosen]


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, 64, generator=generator)
    live = torch.rand(tokens, generator=generator) < 0.8
    image = torch.rand(tokens, generator=generator) < 0.4
    return x, live, image


def test_choice_weights_and_counts(make_config: Callable) -> None:
    own = filled(make_config(num_experts_per_tok=3))
    x, live, image = inputs(60)
    wanted, counts, _ = slow(own, x, live, image)
    routing = own(x, live, image)
    assert routing.counts.tolist() == counts
    assert routing.weights.dtype == torch.float32
    for t in range(60):
        if not live[t]:
            assert routing.experts[t].tolist() == [8] * 3
            continue
        found = dict(zip(routing.experts[t].tolist(), routing.weights[t].tolist(), strict=True))
        assert found == pytest.approx(wanted[t], rel=1e-5)


def test_the_bias_steers_the_choice_and_nothing_else(make_config: Callable) -> None:
    own = filled(make_config())
    x, live, image = inputs(30)
    image[:] = False
    live[:] = True
    own.bias.zero_()
    own.bias[[2, 5]] = 100.0
    routing = own(x, live, image)
    assert routing.experts.sort(-1).values.tolist() == [[2, 5]] * 30
    scores = torch.log1p((x.double() @ own.weight.double().T).exp()).sqrt()
    wanted = scores.gather(1, routing.experts)
    wanted = wanted / wanted.sum(1, keepdim=True) * 1.5
    torch.testing.assert_close(routing.weights.double(), wanted, rtol=1e-5, atol=1e-6)
    assert not own.bias.requires_grad and not own.bias_vl.requires_grad
    assert {n for n, _ in own.named_parameters()} == {"weight"}
    assert {n for n, _ in own.named_buffers()} == {"bias", "bias_vl"}


def test_image_tokens_follow_the_bias_of_images(make_config: Callable) -> None:
    own = filled(make_config())
    x, live, image = inputs(40)
    live[:] = True
    own.bias.zero_()
    own.bias_vl.zero_()
    own.bias[[0, 1]], own.bias_vl[[6, 7]] = 100.0, 100.0
    routing = own(x, live, image)
    for t in range(40):
        assert sorted(routing.experts[t].tolist()) == ([6, 7] if image[t] else [0, 1])
    texts, images = int((~image).sum()), int(image.sum())
    assert routing.counts.tolist() == [[texts, texts] + [0] * 6, [0] * 6 + [images, images]]


def test_gradients(make_config: Callable, relative: Callable) -> None:
    own = filled(make_config(num_experts_per_tok=3))
    x, live, image = inputs(20)
    live[:] = True
    x.requires_grad_()
    routing = own(x, live, image)
    weight = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((routing.weights * weight).sum(), [x, own.weight])
    wide, gate = (t.detach().double().requires_grad_() for t in (x, own.weight))
    picked = torch.log1p((wide @ gate.T).exp()).sqrt().gather(1, routing.experts)
    shares = picked / (picked.sum(1, keepdim=True) + 1e-20) * 1.5
    exact = torch.autograd.grad((shares * weight.double()).sum(), [wide, gate])
    for one, other in zip(got, exact, strict=True):
        assert relative(one, other) < 1e-5


def test_the_denominator_holds_1e_20(make_config: Callable) -> None:
    """Both chosen scores are 1e-20, so the sum is 3e-20 with it and 2e-20 without."""
    own = filled(make_config(hidden_size=64))
    own.bias.zero_()
    own.weight.data.zero_()
    own.weight.data[:, 0] = 1.0
    x = torch.zeros(1, 64)
    x[0, 0] = math.log(1e-40)
    one = torch.ones(1, dtype=torch.bool)
    weights = own(x, one, ~one).weights
    assert weights.tolist()[0] == pytest.approx([1.5 / 3, 1.5 / 3], rel=1e-3)
    x[0, 0] = -1000.0  # every score is 0: not 0 / 0
    assert own(x, one, ~one).weights.tolist() == [[0.0, 0.0]]


def test_a_score_of_zero_passes_no_gradient_and_no_nan(make_config: Callable) -> None:
    own = filled(make_config())
    own.bias.zero_()
    x = torch.zeros(2, 64)
    x[:, 0] = 200.0
    own.weight.data.zero_()
    own.weight.data[:, 0] = torch.tensor([1.0, 0.5, -1.0, -1.0, 0.0, 0.1, -1.0, 0.2])
    one = torch.ones(2, dtype=torch.bool)
    x.requires_grad_()
    weights = own(x, one, ~one).weights
    grads = torch.autograd.grad(weights[:, 0].sum(), [x, own.weight])
    assert all(g.isfinite().all() for g in grads)
    assert grads[1][0].any() and not grads[1][[2, 3, 6]].any()
    own.bias[[2, 3]] = 1e3  # chosen although their scores are 0
    weights = own(x, one, ~one).weights
    assert not weights.any()
    grads = torch.autograd.grad(weights.sum(), [x, own.weight])
    assert all(not g.any() for g in grads)


def test_scores_are_fp32_for_narrow_activations(make_config: Callable) -> None:
    own = filled(make_config())
    x, live, image = inputs(10)
    narrow = own(x.bfloat16(), live, image)
    own.weight.data = own.weight.data.bfloat16().float()  # the weight alone is rounded
    wide = own(x.bfloat16().float(), live, image)
    assert torch.equal(narrow.experts, wide.experts)
    assert torch.equal(narrow.weights, wide.weights)
