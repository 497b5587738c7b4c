"""The streams' kernels against torch's operators in fp32 and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from model.hyper_connection import enter, expand, read
from model.kernels.library import without_kernels

ULP = 2.0**-23
WIDTH = 48  # three vectors: an odd number


def entered(streams: Tensor, pre: Tensor, fn: Tensor) -> tuple[Tensor, ...]:
    return enter(streams, pre, fn, 1e-6, read)


def slow_read(streams: Tensor, pre: Tensor) -> Tensor:
    return (pre[:, :, None] * streams).sum(1)


def slow_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    own = post[:, :, None] * y[:, None]
    return own + (comb[:, :, :, None] * streams[:, :, None]).sum(1)


def slow_enter(streams: Tensor, pre: Tensor, fn: Tensor) -> tuple[Tensor, ...]:
    x = streams.flatten(1)
    z = (x @ fn.t()) / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return slow_read(streams, pre), z, streams.clone()


class Case(NamedTuple):
    function: Callable
    slow: Callable
    inputs: list[tuple]  # shapes; T stands for the tokens
    outputs: list[tuple]


CASES = {
    "read": Case(read, slow_read, [("T", 4, WIDTH), ("T", 4)], [("T", WIDTH)]),
    "expand": Case(
        expand,
        slow_expand,
        [("T", WIDTH), ("T", 4, WIDTH), ("T", 4), ("T", 4, 4)],
        [("T", 4, WIDTH)],
    ),
    "enter": Case(
        entered,
        slow_enter,
        [("T", 4, WIDTH), ("T", 4), (24, 4 * WIDTH)],
        [("T", WIDTH), ("T", 24), ("T", 4, WIDTH)],
    ),
}


def example(name: str, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(tokens)
    case = CASES[name]

    def make(shape: tuple) -> Tensor:
        sizes = [tokens if size == "T" else size for size in shape]
        return torch.randn(sizes, generator=generator)

    return [make(shape) for shape in case.inputs], [make(shape) for shape in case.outputs]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, 15, 17, 100])
def test_kernels_are_as_exact_as_operators(
    name: str, tokens: int, threads: int, ran: list[str], both_ways: Callable, relative: Callable
) -> None:
    function = CASES[name].function
    inputs, weights = example(name, tokens)
    found, grads = both_ways(function, inputs, weights)
    assert ran == [f"{name}_forward", f"{name}_backward"]
    with without_kernels():
        plain, plain_grads = both_ways(function, inputs, weights)
    assert len(ran) == 2
    wanted, wanted_grads = both_ways(CASES[name].slow, [t.double() for t in inputs], weights)
    for one, other, exact in zip(
        [*found, *grads], [*plain, *plain_grads], [*wanted, *wanted_grads], strict=True
    ):
        # Sums of up to 200 products, partly cancelling; their rounding is random.
        assert relative(one, exact) < 3 * ULP
        assert relative(one, other) < 6 * ULP


@pytest.mark.parametrize("name", CASES)
def test_a_token_has_the_same_bits_in_any_company(
    name: str, threads: int, ran: list[str], both_ways: Callable
) -> None:
    """By which rebuilt streams are those of the forward pass, and packing changes nothing."""
    function = CASES[name].function
    inputs, weights = example(name, 100)
    found, grads = both_ways(function, inputs, weights)
    part = slice(37, 60)
    few = [t[part] if len(t) == 100 else t for t in inputs]
    few_found, few_grads = both_ways(function, few, [w[part] for w in weights])
    for one, other in zip([*few_found, *few_grads], [*found, *grads], strict=True):
        if len(other) == 100:
            assert torch.equal(one, other[part])
    again = both_ways(function, inputs, weights)[1]
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_arguments_and_gradients_may_be_views(
    name: str, ran: list[str], both_ways: Callable
) -> None:
    function = CASES[name].function
    inputs, weights = example(name, 17)
    weights = [torch.randn(1).expand(w.shape) for w in weights]
    # Every second column of something twice as wide; fn, a parameter, always lies in one piece.
    views = [torch.stack([t, t], -1)[..., 0] if len(t) == 17 else t for t in inputs]
    assert not views[0].is_contiguous()
    found, grads = both_ways(function, views, weights)
    wanted, wanted_grads = both_ways(function, inputs, [w.contiguous() for w in weights])
    assert ran == [f"{name}_forward", f"{name}_backward"] * 2
    for one, other in zip([*found, *grads], [*wanted, *wanted_grads], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_no_tokens(name: str, threads: int, ran: list[str], both_ways: Callable) -> None:
    inputs, weights = example(name, 0)
    found, grads = both_ways(CASES[name].function, inputs, weights)
    assert len(ran) == 2 and found[0].shape == weights[0].shape
    assert not any(grad.any() for grad in grads)


def test_another_reading_is_used(ran: list[str], relative: Callable) -> None:
    (streams, pre, fn), _ = example("enter", 5)
    seen, z, _ = enter(streams, pre, fn, 1e-6, lambda streams, pre: 2 * read(streams, pre))
    wanted_seen, wanted_z, _ = enter(streams, pre, fn, 1e-6, read)
    assert ran == ["read_forward", "enter_forward"]
    assert torch.equal(seen, 2 * wanted_seen) and relative(z, wanted_z) < 4 * ULP


def test_other_streams_and_widths_go_the_operators_way(ran: list[str]) -> None:
    for streams, width in ((2, 48), (4, 40)):
        x = torch.randn(3, streams, width, requires_grad=True)
        post, comb = torch.randn(3, streams), torch.randn(3, streams, streams)
        fn = torch.randn(streams * (streams + 2), streams * width)
        seen, z, again = enter(x, post, fn, 1e-6, read)
        (expand(read(x, post) + seen, again, post, comb).sum() + z.sum()).backward()
    assert ran == []
