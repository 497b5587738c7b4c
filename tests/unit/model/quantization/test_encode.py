"""Encoders of the released formats: nearest values, canonical scales, every value returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from model.quantization.released import (
    decode_fp4,
    decode_fp8_blocks,
    decode_fp8_rows,
    encode_fp4,
    encode_fp8_blocks,
    encode_fp8_rows,
)

GOLDEN = Path(__file__).parents[3] / "golden" / "quantization" / "quant.safetensors"
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = sorted(v for v in torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).tolist())

Encoder = Callable[[Tensor], tuple[Tensor, Tensor]]
PAIRS = {
    "blocks": (encode_fp8_blocks, decode_fp8_blocks),
    "rows": (encode_fp8_rows, decode_fp8_rows),
    "fp4": (encode_fp4, decode_fp4),
}


def random_bytes(kind: str, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Any codes but NaN under any scales but NaN."""
    draw = torch.Generator().manual_seed(seed)
    across = -(-columns // 32)
    down = -(-rows // 32) if kind == "blocks" else rows
    scale = torch.randint(0, 255, (down, across), generator=draw).to(torch.uint8)
    # Products past the largest float are no values; scales of 2^119 and more would make some.
    scale = scale.clamp_max(127 + 118).view(torch.float8_e8m0fnu)
    if kind == "fp4":
        packed = torch.randint(0, 256, (rows, columns // 2), generator=draw).to(torch.uint8)
        return packed.view(torch.int8), scale
    code = torch.randint(0, 127, (rows, columns), generator=draw)
    code += 128 * torch.randint(0, 2, code.shape, generator=draw)
    return code.to(torch.uint8).view(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("kind", PAIRS)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 40).map(lambda n: 2 * n),
    seed=st.integers(0, 2**31),
)
def test_every_representable_value_returns(kind: str, rows: int, columns: int, seed: int) -> None:
    encode, decode = PAIRS[kind]
    values = decode(*random_bytes(kind, rows, columns, seed))
    assert torch.equal(decode(*encode(values)), values)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_canonical_encoding_returns_byte_for_byte(kind: str) -> None:
    encode, decode = PAIRS[kind]
    weight, scale = encode(torch.randn(67, 70, generator=torch.Generator().manual_seed(1)))
    again, scale_again = encode(decode(weight, scale))
    assert torch.equal(again.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(scale_again.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("kind", PAIRS)
def test_each_value_goes_to_the_nearest_ties_to_the_even_code(kind: str) -> None:
    encode, decode = PAIRS[kind]
    levels, top = (LEVELS, 6.0) if kind == "fp4" else (E4M3, 448.0)
    halves = [(a + b) / 2 for a, b in pairwise(levels)]
    near = [math.nextafter(h, d) for h in halves for d in (0.0, math.inf)]
    magnitudes = torch.tensor([*levels, *halves, *near], dtype=torch.float64)
    magnitudes = torch.cat([magnitudes, torch.rand(500, dtype=torch.float64) * top]).float()
    for start in range(0, len(magnitudes) - 31, 31):
        # The largest value fixes every block's scale to 1.
        row = torch.cat([torch.tensor([top]), magnitudes[start : start + 31]])[None]
        row[:, 1::2] *= -1
        found = decode(*encode(row))[0].tolist()
        for value, rounded in zip(row[0].tolist(), found, strict=True):
            assert abs(rounded) == nearest(abs(value), levels), value
            assert rounded * value >= 0


def nearest(value: float, levels: list[float]) -> float:
    """Python's floats are exact here: differences of neighbours and halves have few bits."""
    distance = [abs(level - value) for level in levels]
    best = [i for i, d in enumerate(distance) if d == min(distance)]
    return levels[next((i for i in best if i % 2 == 0), best[0])]


@pytest.mark.parametrize("kind", PAIRS)
def test_scales_are_the_smallest_under_which_the_largest_value_fits(kind: str) -> None:
    encode, _ = PAIRS[kind]
    # 464 is halfway from 448 to 480 and goes down, 7 is halfway from 6 to 8 and goes up.
    fits, too_large = (6.9999995, 7.0) if kind == "fp4" else (464.0, 464.00003)
    for power in (-110, -3, 0, 5, 110):
        for amax, expected in ((fits, power), (too_large, power + 1), (fits / 2, power - 1)):
            _, scale = encode(torch.full((1, 2), -amax) * 2.0**power)
            assert scale.float().item() == 2.0**expected, (amax, power)
    _, scale = encode(torch.full((1, 2), 2.0**-140))
    assert scale.float().item() == 2.0**-127
    _, scale = encode(torch.zeros(3, 4))
    assert scale.float().unique().tolist() == [1.0]


def test_the_reference_bytes_hold_the_same_values_again() -> None:
    data = load_file(GOLDEN)
    for kind, name in (("blocks", "fp8"), ("fp4", "fp4"), ("rows", "rows")):
        encode, decode = PAIRS[kind]
        decoded = data[f"{name}_decoded"]
        assert torch.equal(decode(*encode(decoded)), decoded)


def test_bfloat16_values_are_taken_as_they_are() -> None:
    values = torch.randn(33, 64).bfloat16()
    for encode, _ in PAIRS.values():
        for narrow, wide in zip(encode(values), encode(values.float()), strict=True):
            assert torch.equal(narrow.view(torch.uint8), wide.view(torch.uint8))


def test_a_negative_zero_of_fp4_is_zero() -> None:
    packed, _ = encode_fp4(torch.tensor([[-0.0, -0.1, 6.0, -6.0]]))
    assert packed.view(torch.uint8).tolist() == [[0, 0x7 | 0xF0]]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(4), "two dimensions"),
        (torch.tensor([[1.0, math.nan]]), "NaN"),
        (torch.tensor([[1.0, -math.inf]]), "infinity"),
    ],
)
def test_what_cannot_be_encoded_is_refused(kind: str, values: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PAIRS[kind][0](values)


def test_fp4_needs_pairs_of_columns() -> None:
    with pytest.raises(ValueError, match="two columns a byte, but there are 3"):
        encode_fp4(torch.zeros(2, 3))
