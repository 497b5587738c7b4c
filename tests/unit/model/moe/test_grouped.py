"""Products of rows with the weights of their experts: torch's grouped product and one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.moe import grouped
from model.moe.grouped import Span, by_expert, put_outer, spans

EXPERTS, WIDE, NARROW = 6, 32, 16


def inputs(sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    n = sum(sizes)
    left, right = torch.randn(n, WIDE, generator=draw), torch.randn(n, NARROW, generator=draw)
    weight = torch.randn(EXPERTS, NARROW, WIDE, generator=draw)
    return left.to(dtype), right.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("sizes", [[3, 0, 40], [0, 0, 1], [0, 0, 0], [17, 16, 15]])
@pytest.mark.parametrize("kernel", ["grouped", "one by one"])
def test_products(monkeypatch: pytest.MonkeyPatch, sizes: list[int], kernel: str) -> None:
    """The grouped product runs on a CPU too, where it is not chosen."""
    monkeypatch.setattr(grouped, "has_grouped", lambda rows: kernel == "grouped")
    left, right, weight = inputs(sizes, torch.bfloat16)
    span = Span(2, sizes, 0, sum(sizes))
    found, straight = by_expert(left, weight.mT, span), by_expert(right, weight, span)
    outer = torch.full((EXPERTS, WIDE, NARROW), 7.0, dtype=torch.bfloat16)
    put_outer(outer, left, right, span)
    at = 0
    for e, size in enumerate(sizes, start=2):
        mine = slice(at, at + size)
        at += size
        wide, other, w = left[mine].double(), right[mine].double(), weight[e].double()
        torch.testing.assert_close(found[mine].double(), wide @ w.T, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(straight[mine].double(), other @ w, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(outer[e].double(), wide.T @ other, rtol=1e-2, atol=1e-2)
        assert size or not outer[e].any()
    assert (outer[[0, 1, 5]] == 7).all(), "the other experts' are left alone"


def test_grouped_is_for_bfloat16_on_a_gpu() -> None:
    for device, dtype, wanted in (
        ("cpu", torch.bfloat16, False),
        ("meta", torch.bfloat16, False),
        ("cpu", torch.float32, False),
    ):
        assert grouped.has_grouped(torch.empty(1, 8, device=device, dtype=dtype)) is wanted


def test_spans_take_what_there_is_room_for() -> None:
    sizes = [3, 0, 4, 9, 0, 1]
    assert list(spans(10, sizes, most=7)) == [
        Span(10, [3, 0, 4], 0, 7),
        Span(13, [9], 7, 16),
        Span(14, [0, 1], 16, 17),
    ]
    assert list(spans(0, sizes, most=99)) == [Span(0, sizes, 0, 17)]
    assert [s.sizes for s in spans(0, [5, 5], most=1)] == [[5], [5]]
