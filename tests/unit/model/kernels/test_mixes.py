"""The coefficients' kernels against torch's operators in fp32 and in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from model.hyper_connection import coefficients
from model.kernels.library import without_kernels

ULP = 2.0**-23
LOGITS = 24
# Sums are of positive numbers, so nothing cancels: a coefficient's error is that of 39 divisions,
# each of half a unit in the last place, at most.
ROUNDINGS = 20 * ULP


def coarse(shape: tuple[int, ...], size: float, generator: torch.Generator) -> Tensor:
    """Random multiples of size / 64: sums and products of two are exact in fp32."""
    return torch.randint(-64, 65, shape, generator=generator) * (size / 64)


def example(tokens: int, size: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """z, base and scale with logits that no rounding touches, and gradients of their mix."""
    generator = torch.Generator().manual_seed(tokens)
    inputs = [
        coarse((tokens, LOGITS), size, generator),
        coarse((LOGITS,), size / 16, generator),
        torch.tensor([0.5, -1.0, 1.0]),
    ]
    shapes = (tokens, 4), (tokens, 4), (tokens, 4, 4)
    return inputs, [torch.randn(shape, generator=generator) for shape in shapes]


def mixes(iterations: int = 20, eps: float = 1e-6) -> Callable[..., tuple[Tensor, ...]]:
    return partial(coefficients, iterations=iterations, eps=eps)


@pytest.mark.parametrize("tokens", [1, 15, 17, 100])
def test_kernels_are_as_exact_as_operators(
    tokens: int, threads: int, ran: list[str], both_ways: Callable, relative: Callable
) -> None:
    inputs, weights = example(tokens, 4.0)
    found, grads = both_ways(mixes(), inputs, weights)
    assert ran == ["mixes_forward", "mixes_backward"]
    with without_kernels():
        plain, plain_grads = both_ways(mixes(), inputs, weights)
    assert len(ran) == 2
    wanted, wanted_grads = both_ways(mixes(), [t.double() for t in inputs], weights)
    for one, other, exact in zip(found, plain, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=ROUNDINGS, atol=0)
        torch.testing.assert_close(one, other, rtol=2 * ROUNDINGS, atol=0)
        assert relative(one, exact) < ULP
    for one, other, exact in zip(grads, plain_grads, wanted_grads, strict=True):
        # Differences cancel, in either way: what is left is exact as a whole.
        assert relative(one, exact) < 4 * ULP
        assert relative(one, other) < 8 * ULP


@pytest.mark.parametrize("iterations", [1, 2, 7])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_other_iterations_and_eps(
    iterations: int, eps: float, ran: list[str], both_ways: Callable, relative: Callable
) -> None:
    inputs, weights = example(33)
    found, grads = both_ways(mixes(iterations, eps), inputs, weights)
    assert len(ran) == 2
    wide = [t.double() for t in inputs]
    wanted, wanted_grads = both_ways(mixes(iterations, eps), wide, weights)
    for one, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=ROUNDINGS, atol=0)
    for one, exact in zip(grads, wanted_grads, strict=True):
        assert relative(one, exact) < 4 * ULP


def test_extreme_logits_and_ties(threads: int, ran: list[str], both_ways: Callable) -> None:
    """Logits of +-80, all alike in some rows, one against three in others."""
    signs = torch.tensor([1.0, -1.0])
    rows = torch.cartesian_prod(*[signs] * 4).repeat(1, 6)
    rows = torch.cat([rows, rows.roll(1, 1) * rows, torch.zeros(3, LOGITS)])
    z, weights = 80 * rows, example(len(rows))[1]
    inputs = [z, torch.zeros(LOGITS), torch.ones(3)]
    found, grads = both_ways(mixes(), inputs, weights)
    assert len(ran) == 2
    wanted, wanted_grads = both_ways(mixes(), [t.double() for t in inputs], weights)
    for one, exact in zip(found, wanted, strict=True):
        # e^-80 is 2e-35: beside eps it is nothing, and in twice a sigmoid it is less than that.
        torch.testing.assert_close(one.double(), exact, rtol=ROUNDINGS, atol=1e-30)
    # Of the gradients' terms, which are up to 5, hardly anything is left. In scale's they are
    # summed times z over up to 16 logits of all tokens.
    sums = [1, len(rows), 80 * 16 * len(rows)]
    for one, exact, size in zip(grads, wanted_grads, sums, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=4 * ULP, atol=4 * ULP * size)


def test_logits_beyond_the_exponentials_range_saturate(ran: list[str]) -> None:
    z = torch.full((2, LOGITS), 300.0)
    z[1] = -300.0
    z.requires_grad_()
    pre, post, comb = mixes()(z, torch.zeros(LOGITS), torch.ones(3))
    assert pre[0].tolist() == pytest.approx([1 + 1e-6] * 4)
    assert pre[1].tolist() == pytest.approx([1e-6] * 4)
    assert post[0].tolist() == [2.0] * 4 and post[1].tolist() == pytest.approx([0] * 4, abs=1e-30)
    assert comb.flatten().tolist() == pytest.approx([0.25] * 32)
    (pre.sum() + post.sum() + comb[:, 0].sum()).backward()
    assert z.grad is not None and z.grad.abs().max() < 1e-6


def test_a_token_that_is_not_a_number_spoils_no_other(ran: list[str]) -> None:
    (z, base, scale), _ = example(20)
    clean = mixes()(z, base, scale)
    z[3] = float("nan")
    others = [i for i in range(20) if i != 3]
    for one, other in zip(mixes()(z, base, scale), clean, strict=True):
        assert one[3].isnan().all()
        assert torch.equal(one[others], other[others])


def test_a_token_has_the_same_bits_in_any_company(
    threads: int, ran: list[str], both_ways: Callable
) -> None:
    inputs, weights = example(100)
    found, grads = both_ways(mixes(), inputs, weights)
    part = slice(37, 60)
    few, few_grads = both_ways(mixes(), [inputs[0][part], *inputs[1:]], [w[part] for w in weights])
    for one, other in zip([*few, few_grads[0]], [*found, grads[0]], strict=True):
        assert torch.equal(one, other[part])
    again = both_ways(mixes(), inputs, weights)[1]
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))


def test_one_unused_coefficient_and_expanded_gradients(ran: list[str], relative: Callable) -> None:
    (z, base, scale), _ = example(18)
    leaf, wide = z.clone().requires_grad_(), z.double().requires_grad_()
    mixes()(leaf, base, scale)[2].sum().backward()  # the sum's gradient is one number, expanded
    mixes()(wide, base.double(), scale.double())[2].sum().backward()
    assert leaf.grad is not None and wide.grad is not None
    assert ran == ["mixes_forward", "mixes_backward"]
    assert not leaf.grad[:, :8].any()
    # The sum is 4 but for eps whatever the logits are, so its gradient is rounding alone.
    assert (leaf.grad - wide.grad).abs().max() < 4 * ULP
