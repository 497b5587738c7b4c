"""The attention kernel against torch's operators on sizes that do not fill vectors and groups."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.attention.fused import FusedTile, tile_of
from model.attention.tiles import KeyGradients, Keys, Tile
from model.kernels.library import without_kernels

TOKENS, ENTRIES = 45, 21


def case(heads: int, dim: int, window: int, chosen: int) -> tuple[Keys, Tensor, Tensor]:
    """Two documents, the last three tokens padding; queries and the gradient of their outputs."""
    generator = torch.Generator().manual_seed(heads * dim + window)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    start = torch.zeros(TOKENS, dtype=torch.int64)
    start[20:] = 20
    start[-3:] = torch.arange(TOKENS - 3, TOKENS) + 1
    selected = entries = None
    if chosen:
        entries = normal(ENTRIES, dim)
        picks = torch.rand(TOKENS, ENTRIES, generator=generator).argsort(-1)[:, :chosen]
        absent = torch.rand(TOKENS, chosen, generator=generator) < 0.3
        absent[-3:] = True
        selected = picks.masked_fill(absent, -1)
    keys = Keys.of(normal(TOKENS, dim), start, normal(heads), entries, selected, window)
    return keys, normal(TOKENS, heads, dim), normal(TOKENS, heads, dim)


def everything(keys: Keys, q: Tensor, grad: Tensor, *, workspace: int) -> list[Tensor]:
    """Outputs, log sums, masses and gradients, in two tiles."""
    into = KeyGradients.zeros(keys)
    found = []
    for low, high in ((0, keys.block), (keys.block, TOKENS)):
        tile = tile_of(keys, q[low:high], low, workspace_bytes=workspace)
        output = tile.output()
        found += [output, tile.log_sum[: high - low]]
        if keys.selected is not None:
            found.append(tile.mass())
        tile.settle()
        found.append(tile.backward(grad[low:high], output, into))
    sums = [into.near, into.sink, *([] if into.entries is None else [into.entries])]
    return found + sums


@pytest.mark.parametrize(
    ("heads", "dim", "window", "chosen"),
    [(1, 16, 1, 1), (5, 48, 7, 9), (17, 64, 40, 3), (8, 80, 12, 0), (4, 128, 3, 8)],
)
def test_as_torchs_operators(
    ran: list[str],
    threads: int,
    relative: Callable,
    heads: int,
    dim: int,
    window: int,
    chosen: int,
) -> None:
    keys, q, grad = case(heads, dim, window, chosen)
    with without_kernels():
        assert isinstance(tile_of(keys, q, 0, workspace_bytes=1), Tile)
        wanted = everything(keys, q, grad, workspace=1 << 20)
    assert not ran
    for workspace in (1, 1 << 20):  # one thread sums up, or all
        found = everything(keys, q, grad, workspace=workspace)
        assert set(ran) >= {"attend_forward", "attend_backward"}
        for one, other in zip(found, wanted, strict=True):
            assert relative(one, other) < 2e-6


def test_the_same_bits_every_time(ran: list[str], threads: int) -> None:
    keys, q, grad = case(8, 64, 12, 6)
    first, second = (everything(keys, q, grad, workspace=1 << 20) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_scores_far_apart_and_what_is_not_a_number(ran: list[str]) -> None:
    """One key takes everything; a NaN in one query stays with it, to be found."""
    keys, q, _ = case(2, 16, 4, 0)
    far = q * 300
    tile = tile_of(keys, far, 0, workspace_bytes=1 << 20)
    assert isinstance(tile, FusedTile)
    with without_kernels():
        wanted = tile_of(keys, far, 0, workspace_bytes=1 << 20).output()
    torch.testing.assert_close(tile.output(), wanted, rtol=1e-4, atol=1e-4)
    q[7, 1, 3] = torch.nan
    output = tile_of(keys, q, 0, workspace_bytes=1 << 20).output()
    assert output[7, 1].isnan().all()
    output[7, 1] = 0
    assert output.isfinite().all()


def test_other_widths_are_torchs(ran: list[str]) -> None:
    keys, q, _ = case(2, 24, 4, 0)
    assert isinstance(tile_of(keys, q, 0, workspace_bytes=1 << 20), Tile)
    assert not ran
