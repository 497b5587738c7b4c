"""The summed loss against torch's cross-entropy in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.loss import cross_entropy_sum

VOCABULARY, WIDTH = 50, 12


def inputs(tokens: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator) * scale
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[1::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("workspace", [1, 1000, 3000, 1 << 20])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_value_and_gradients(workspace: int, scale: float, relative: Callable) -> None:
    hidden, weight, labels = inputs(37, scale)
    loss = cross_entropy_sum(hidden, weight, labels, workspace_bytes=workspace)
    assert loss.dtype == torch.float32 and loss.shape == ()
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].T, labels, reduction="sum", ignore_index=-100)
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=2e-6)
    got = torch.autograd.grad(loss * 0.25, [hidden, weight])
    for one, other in zip(got, torch.autograd.grad(exact * 0.25, wide), strict=True):
        assert relative(one, other) < 5e-6
    assert not got[0][1::3].any()


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_labels_at_all(tokens: int) -> None:
    hidden, weight, labels = inputs(tokens)
    loss = cross_entropy_sum(hidden, weight, labels.fill_(-100), workspace_bytes=100)
    assert float(loss.detach()) == 0.0
    grads = torch.autograd.grad(loss, [hidden, weight])
    assert all(not g.any() for g in grads)
    assert [g.shape for g in grads] == [hidden.shape, weight.shape]


def test_only_what_is_asked_for_gets_a_gradient(relative: Callable) -> None:
    hidden, weight, labels = inputs(9)
    frozen = weight.detach()
    loss = cross_entropy_sum(hidden, frozen, labels, workspace_bytes=100)
    (grad,) = torch.autograd.grad(loss, hidden)
    both = cross_entropy_sum(hidden, weight, labels, workspace_bytes=100)
    assert torch.equal(grad, torch.autograd.grad(both, hidden)[0])
    with torch.no_grad():
        assert torch.equal(cross_entropy_sum(hidden, weight, labels, workspace_bytes=100), both)


def test_bf16_hidden_states(relative: Callable) -> None:
    hidden, weight, labels = inputs(20)
    narrow = hidden.detach().bfloat16().requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    losses = [cross_entropy_sum(h, weight, labels, workspace_bytes=1000) for h in (narrow, wide)]
    assert torch.equal(*losses)
    (one,), (other,) = (
        torch.autograd.grad(loss, h) for loss, h in zip(losses, (narrow, wide), strict=True)
    )
    assert one.dtype == torch.bfloat16
    assert torch.equal(one, other.bfloat16())


def test_a_second_differentiation_is_refused_not_wrong() -> None:
    hidden, weight, labels = inputs(5)
    loss = cross_entropy_sum(hidden, weight, labels, workspace_bytes=1000)
    loss.backward(retain_graph=True)
    with pytest.raises((AssertionError, RuntimeError)):
        loss.backward()


class Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_the_logits_of_all_tokens_never_exist() -> None:
    hidden, weight, labels = inputs(2000)
    with Largest() as largest:
        cross_entropy_sum(hidden, weight, labels, workspace_bytes=80_000).backward()
    assert largest.numel <= 2000 * WIDTH < 2000 * VOCABULARY // 3
