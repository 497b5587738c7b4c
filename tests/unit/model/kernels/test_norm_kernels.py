"""RMSNorm's kernels against torch's operators in fp32 and in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.kernels.library import without_kernels
from model.norm import rms_norm

ULP = 2.0**-23


def norm(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.float64:  # torch's way is fp32
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    return rms_norm(x, weight, 1e-6)


def example(*shape: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    return [x, torch.randn(shape[-1], generator=generator)], [grad]


@pytest.mark.parametrize("shape", [(1, 16), (15, 48), (17, 128), (100, 48), (3, 5, 7, 32)])
def test_kernels_are_as_exact_as_operators(
    shape: tuple, threads: int, ran: list[str], both_ways: Callable, relative: Callable
) -> None:
    inputs, weights = example(*shape)
    found, grads = both_ways(norm, inputs, weights)
    assert ran == ["norm_forward", "norm_backward"]
    with without_kernels():
        plain, plain_grads = both_ways(norm, inputs, weights)
    assert len(ran) == 2
    wanted, wanted_grads = both_ways(norm, [t.double() for t in inputs], weights)
    for one, other, exact in zip(
        [*found, *grads], [*plain, *plain_grads], [*wanted, *wanted_grads], strict=True
    ):
        assert relative(one, exact) < 2 * ULP
        assert relative(one, other) < 4 * ULP


def test_a_weights_gradient_is_exact_over_many_rows(
    threads: int, ran: list[str], both_ways: Callable, relative: Callable
) -> None:
    """All of one sign, where a plain running sum in fp32 would lose a tenth of a thousandth."""
    inputs, _ = example(50_000, 16)
    inputs[0].abs_()
    weights = [inputs[0].clone()]
    _, grads = both_ways(norm, inputs, weights)
    _, wanted = both_ways(norm, [t.double() for t in inputs], weights)
    assert relative(grads[1], wanted[1]) < ULP


def test_rows_have_the_same_bits_in_any_company(
    threads: int, ran: list[str], both_ways: Callable
) -> None:
    inputs, weights = example(100, 48)
    found, grads = both_ways(norm, inputs, weights)
    few, few_grads = both_ways(norm, [inputs[0][37:60], inputs[1]], [weights[0][37:60]])
    assert torch.equal(few[0], found[0][37:60])
    assert torch.equal(few_grads[0], grads[0][37:60])
    again = both_ways(norm, inputs, weights)[1]
    assert torch.equal(again[1], grads[1])


def test_views_zeros_and_no_rows(ran: list[str], both_ways: Callable) -> None:
    (x, weight), weights = example(9, 96)
    # A part of each row, and one number for all gradients.
    part, grad = x[:, 32:64], torch.ones(1).expand(9, 32)
    found, grads = both_ways(norm, [part, weight[:32]], [grad])
    wanted, others = both_ways(norm, [part.contiguous(), weight[:32]], [grad.contiguous()])
    for one, other in zip([*found, *grads], [*wanted, *others], strict=True):
        assert torch.equal(one, other)
    found, grads = both_ways(norm, [torch.zeros_like(x), weight], weights)
    assert not found[0].any() and grads[0].isfinite().all() and not grads[1].any()
    found, grads = both_ways(norm, [x[:0], weight], [weights[0][:0]])
    assert found[0].shape == (0, 96) and not grads[1].any()


def test_other_widths_and_types_go_the_operators_way(ran: list[str]) -> None:
    rms_norm(torch.randn(3, 40), torch.randn(40), 1e-6)
    rms_norm(torch.randn(3, 48).bfloat16(), torch.randn(48), 1e-6)
    assert ran == []
