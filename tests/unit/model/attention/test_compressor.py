"""Compressed latents against a loop over groups in float64, and which queries may see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.attention.compressor import Compressor
from model.layout import Layout, ModelInputs, pad_rows


def filled(config, ratio: int) -> Compressor:
    own = Compressor(config, ratio)
    generator = torch.Generator().manual_seed(0)
    for p in own.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.3
    return own


def slow(x: Tensor, own: Compressor) -> Tensor:
    """[T, D] -> [T / ratio, head_dim], feature by feature softmax."""
    r, out = own.ratio, []
    wkv, norm = own.wkv.weight.double(), own.norm.weight.double()
    for g in range(x.shape[0] // r):
        group = x[g * r : (g + 1) * r]
        latent = wkv @ group[0]
        if r > 1:
            values, scores = group @ wkv.T, group @ own.wgate.weight.double().T
            powers = scores.exp()
            latent = sum(values[i] * powers[i] for i in range(r)) / sum(powers[i] for i in range(r))
        out.append(latent / (latent.square().mean() + own.norm.eps).sqrt() * norm)  # type: ignore[union-attr]
    return torch.stack(out)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_latents_and_gradients(make_config: Callable, relative: Callable, ratio: int) -> None:
    own = filled(make_config(), ratio)
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found, wanted = own(x), slow(wide, own)
    assert found.shape == (12 // ratio, 32)
    assert relative(found, wanted) < 2e-6
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    parameters = list(own.parameters())
    got = torch.autograd.grad((found * weight).sum(), [x, *parameters])
    exact = torch.autograd.grad((wanted * weight.double()).sum(), [wide, *parameters])
    for one, other in zip(got, exact, strict=True):
        assert relative(one, other) < 1e-5


def test_only_ratio_one_has_no_gate(make_config: Callable) -> None:
    names = [set(dict(Compressor(make_config(), r).named_parameters())) for r in (1, 2)]
    assert names == [
        {"wkv.weight", "norm.weight"},
        {"wkv.weight", "wgate.weight", "norm.weight"},
    ]


@pytest.mark.parametrize("ratio", [1, 2])
def test_bf16_activations(make_config: Callable, ratio: int, relative: Callable) -> None:
    """Above ratio 1 all is fp32 until the cast before the norm."""
    own = filled(make_config(), ratio)
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = own(x)
    assert found.dtype == torch.bfloat16
    assert relative(found, slow(x.double(), own)) < 8e-3
    if ratio > 1:
        wide = x.float()
        values, scores = own.wkv(wide), own.wgate(wide)
        share = torch.sigmoid(scores[::2] - scores[1::2])
        pooled = values[::2] * share + values[1::2] * (1 - share)
        assert relative(found, own.norm(pooled.bfloat16())) < 1e-3


def layout(lengths: list[int], step: int) -> tuple[Layout, list[tuple[int, int]]]:
    """Documents at multiples of `step`; (start, length) of each."""
    places, at = [], 0
    for n in lengths:
        places.append((at, n))
        at += -(-n // step) * step
    seq, position = torch.zeros(1, at).long(), torch.zeros(1, at).long()
    for number, (low, n) in enumerate(places, start=1):
        seq[0, low : low + n] = number
        position[0, low : low + n] = torch.arange(n)
    types = torch.full((1, at), -1, dtype=torch.int8)
    return Layout.of(ModelInputs(seq, seq, position, types)), places


@pytest.mark.parametrize("ratio", [1, 2, 3, 6])
def test_a_group_is_visible_once_complete_and_only_to_its_document(ratio: int) -> None:
    found, places = layout([1, 7, 2, 12, 5], step=6)
    seen = found.visible(ratio)
    owner = {t: (low, n) for low, n in places for t in range(low, low + n)}
    for t in range(len(found.live)):
        visible = list(range(int(seen.low[t]), int(seen.high[t])))
        wanted = []
        if t in owner:
            low, n = owner[t]
            # All the tokens of the group lie in the document, at or before t.
            groups = [range(low + g * ratio, low + (g + 1) * ratio) for g in range(n)]
            wanted = [g[0] // ratio for g in groups if g[-1] <= t and g[-1] < low + n]
        assert visible == wanted


def test_padding_sees_nothing_and_starts_past_itself() -> None:
    found, _ = layout([4, 3], step=6)
    dead = ~found.live
    index = torch.arange(12)
    assert dead.nonzero().flatten().tolist() == [4, 5, 9, 10, 11]
    assert torch.equal(found.start[dead], index[dead] + 1)
    assert found.start[found.live].tolist() == [0] * 4 + [6] * 3
    seen = found.visible(2)
    assert torch.equal(seen.low[dead], seen.high[dead])


def test_rows_are_widened_with_padding() -> None:
    types = torch.tensor([[-1, 1]], dtype=torch.int8)
    two = torch.tensor([[1, 1]])
    inputs = ModelInputs(torch.tensor([[5, 6]]), two, torch.tensor([[0, 1]]), types)
    assert pad_rows(inputs, 2, pad_token_id=9) is inputs
    wide = pad_rows(inputs, 4, pad_token_id=9)
    assert wide.input_ids.tolist() == [[5, 6, 9, 9]]
    assert wide.seq_ids.tolist() == [[1, 1, 0, 0]]
    assert wide.position_ids.tolist() == [[0, 1, 0, 0]]
    assert wide.token_types.tolist() == [[-1, 1, -1, -1]]
    assert Layout.of(wide).image.tolist() == [False, True, False, False]
