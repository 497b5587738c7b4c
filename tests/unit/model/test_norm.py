"""RMSNorm against autograd of its formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.norm import RMSNorm


def slow(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight


@pytest.mark.parametrize("eps", [1e-20, 1e-6, 0.3])
@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 12)])
def test_forward_and_backward(eps: float, shape: tuple, relative: Callable) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    x.requires_grad_()
    norm = RMSNorm(12, eps)
    norm.weight.data = torch.randn(12, generator=generator)
    y = norm(x)
    y.backward(grad)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double()
    weight.requires_grad_()
    wanted = slow(wide, weight, eps)
    wanted.backward(grad.double())
    assert relative(y, wanted) < 1e-6
    assert x.grad is not None and wide.grad is not None
    assert norm.weight.grad is not None and weight.grad is not None
    assert relative(x.grad, wide.grad) < 2e-6
    assert relative(norm.weight.grad, weight.grad) < 1e-6


@pytest.mark.parametrize("fp32_weight", [False, True])
def test_bf16_is_rounded_once_at_the_end(fp32_weight: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 32, generator=generator).bfloat16()
    norm = RMSNorm(32, 1e-20, fp32_weight=fp32_weight)
    norm.weight.data = torch.randn(32, generator=generator)
    weight = norm.weight if fp32_weight else norm.weight.bfloat16()
    exact = slow(x.double(), weight.double(), 1e-20)
    found = norm(x)
    assert found.dtype == torch.bfloat16
    # One rounding to 8 bits: half a unit in the last place, a little more for fp32.
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * 1.001).all()


def test_zeros_stay_finite_both_ways() -> None:
    x = torch.zeros(2, 4, requires_grad=True)
    norm = RMSNorm(4, 1e-20)
    norm.weight.data.fill_(1.0)
    y = norm(x)
    y.backward(torch.ones(2, 4))
    assert not y.any()
    assert x.grad is not None and x.grad.isfinite().all()
