"""SwiGLU by the kernel against torch's operators, at and beyond the clamps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.kernels.library import without_kernels
from model.moe.swiglu import swiglu, swiglu_backward

LIMIT = 3.0


def numbers(rows: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    both = torch.randn(rows, 2 * inner, generator=generator) * 2
    both[0, :8] = torch.tensor([LIMIT, -LIMIT, LIMIT + 1e-6, 50.0, -50.0, -100.0, 0.0, 1e4])
    both[-1, inner : inner + 5] = torch.tensor([LIMIT, -LIMIT, 4.0, -4.0, 0.0])
    weight = torch.rand(rows, generator=generator)
    return both, weight, torch.randn(rows, inner, generator=generator)


@pytest.mark.parametrize(("rows", "inner"), [(1, 16), (7, 48), (130, 96)])
@pytest.mark.parametrize("weighted", [True, False])
def test_as_torchs_operators(
    ran: list[str], threads: int, relative: Callable, rows: int, inner: int, weighted: bool
) -> None:
    both, weight, grad = numbers(rows, inner)
    weights = weight if weighted else None

    def everything() -> list[Tensor]:
        found = swiglu_backward(grad, both, LIMIT, weights)
        assert (found.by_weight is None) == (weights is None)
        made = [found.by_both, found.hidden, swiglu(both, LIMIT, weights)]
        return made if found.by_weight is None else [*made, found.by_weight]

    with without_kernels():
        wanted = everything()
    assert not ran
    found = everything()
    assert ran == ["swiglu_backward", "swiglu_forward"]
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 1e-6
    cut, wanted_cut = (by_both.abs() < 1e-30 for by_both in (found[0], wanted[0]))
    assert torch.equal(cut, wanted_cut)


def test_what_is_not_a_number_stays_so(ran: list[str]) -> None:
    both = torch.ones(2, 32)
    both[0, 3] = both[1, 20] = torch.nan
    hidden = swiglu(both, LIMIT)
    assert ran
    assert hidden.isnan().nonzero().tolist() == [[0, 3], [1, 4]]
