"""Each gate at, below and above its limit, and with what must never pass."""

from __future__ import annotations

import math

import pytest
import torch

from launcher.verify.gates import absent, exact, mostly_within, within, zero


def test_within_is_norm_of_difference_over_norm_of_reference() -> None:
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    ours = reference + torch.tensor([[0.0, 0.003], [0.004, 0.0]])
    check = within("logits", "logits", ours, reference, limit=2e-3)
    assert check.error == pytest.approx(1e-3, rel=1e-4)
    assert check.passed
    assert not within("logits", "logits", ours, reference, limit=5e-4).passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_never_passes(bad: float) -> None:
    reference = torch.ones(3, 2)
    ours = reference.clone()
    ours[1, 1] = bad
    assert not within("g", "s", ours, reference, limit=1e9).passed
    assert not within("g", "s", reference, ours, limit=1e9).passed
    assert not mostly_within("g", "s", ours, reference, limit=1e-4, share=0.99).passed
    assert not exact("g", "s", ours, reference).passed
    assert not zero("g", "s", ours * 0).passed


def test_a_zero_reference_admits_only_zero() -> None:
    nothing = torch.zeros(4)
    assert within("g", "s", nothing, nothing, limit=1e-6).passed
    assert not within("g", "s", torch.full((4,), 1e-30), nothing, limit=1e-6).passed
    assert zero("g", "s", -nothing).passed
    found = zero("g", "s", torch.tensor([0.0, 1e-30, 0.0]))
    assert not found.passed
    assert (found.error, found.total) == (1, 3)


def test_mostly_within_counts_tokens_not_elements() -> None:
    reference = torch.ones(200, 8)
    ours = reference.clone()
    ours[:2] += 1.0  # 2 of 200 tokens may cross a rounding boundary
    check = mostly_within("logits", "logits", ours, reference, limit=1e-4, share=0.99)
    assert check.passed
    assert check.gate.startswith("198 of 200 tokens")
    ours[2, 3] += 0.1
    check = mostly_within("logits", "logits", ours, reference, limit=1e-4, share=0.99)
    assert not check.passed
    assert check.gate.startswith("197 of 200 tokens")


def test_exact_counts_differences() -> None:
    reference = torch.tensor([[1, 2], [3, 2**53 + 1]])
    ours = reference.clone()
    assert exact("rows", "r", ours, reference).passed
    ours[1, 1] -= 1  # equal in float64
    found = exact("rows", "r", ours, reference)
    assert not found.passed
    assert (found.error, found.total) == (1, 4)
    assert exact("rows", "r", ours, reference, ungated="a tie").passed


def test_shapes_are_compared_first() -> None:
    for found in (
        within("g", "s", torch.ones(3), torch.ones(1), limit=1.0),
        mostly_within("g", "s", torch.ones(3, 1), torch.ones(3), limit=1.0, share=0.5),
        exact("g", "s", torch.ones(3), torch.ones(1), ungated="a tie"),
    ):
        assert not found.passed
        assert "shape" in found.gate
    assert not absent("g", "s", "no such parameter").passed
