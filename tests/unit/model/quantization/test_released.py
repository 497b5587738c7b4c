"""Decoding of released weights: the reference numbers, the bytes by hand, refused mismatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.quantization.released import decode_fp4, decode_fp8_blocks, decode_fp8_rows

GOLDEN = Path(__file__).parents[3] / "golden" / "quantization" / "quant.safetensors"


def e8m0(exponents: list[list[int]]) -> Tensor:
    return torch.tensor(exponents, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_reference_fp8_blocks_with_ragged_edges() -> None:
    data = load_file(GOLDEN)
    assert data["fp8_weight"].shape == (70, 96)
    assert data["fp8_scale"].shape == (3, 3)
    decoded = decode_fp8_blocks(data["fp8_weight"], data["fp8_scale"])
    assert same_bits(decoded, data["fp8_decoded"])


def test_reference_fp4() -> None:
    data = load_file(GOLDEN)
    assert same_bits(decode_fp4(data["fp4_packed"], data["fp4_scale"]), data["fp4_decoded"])


def test_reference_rows_whole_and_by_id() -> None:
    data = load_file(GOLDEN)
    weight, scale, expected = data["rows_fp8"], data["rows_scale"], data["rows_decoded"]
    assert same_bits(decode_fp8_rows(weight, scale), expected)
    ids = torch.tensor([49, 3, 3, 17])
    some = weight.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
    some_scale = scale.view(torch.uint8)[ids].view(torch.float8_e8m0fnu)
    assert same_bits(decode_fp8_rows(some, some_scale), expected[ids])


def test_every_fp4_byte_low_nibble_first() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    levels = positive + [-v for v in positive]
    packed = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None]
    decoded = decode_fp4(packed, e8m0([[127 + 3] * 16]))
    assert decoded[0, 0::2].tolist() == [8 * levels[byte % 16] for byte in range(256)]
    assert decoded[0, 1::2].tolist() == [8 * levels[byte // 16] for byte in range(256)]


def test_edge_blocks_take_their_own_scale() -> None:
    weight = torch.ones(33, 34).to(torch.float8_e4m3fn)
    decoded = decode_fp8_blocks(weight, e8m0([[127, 128], [129, 130]]))
    assert decoded[:32, :32].unique().tolist() == [1.0]
    assert decoded[:32, 32:].unique().tolist() == [2.0]
    assert decoded[32:, :32].unique().tolist() == [4.0]
    assert decoded[32:, 32:].unique().tolist() == [8.0]


def test_extreme_scales() -> None:
    weight = torch.ones(1, 96).to(torch.float8_e4m3fn)
    decoded = decode_fp8_rows(weight, e8m0([[0, 254, 255]]))
    assert decoded[0, 0].item() == 2.0**-127
    assert decoded[0, 32].item() == 2.0**127
    assert decoded[0, 64:].isnan().all()


def test_bfloat16_rounds_the_exact_product_once() -> None:
    data = load_file(GOLDEN)
    decoded = decode_fp4(data["fp4_packed"], data["fp4_scale"], dtype=torch.bfloat16)
    assert decoded.dtype == torch.bfloat16
    assert torch.equal(decoded, data["fp4_decoded"].bfloat16())


@pytest.mark.parametrize(
    ("weight", "scale", "message"),
    [
        (torch.zeros(64, 64), e8m0([[127, 127], [127, 127]]), "expected torch.float8_e4m3fn"),
        (torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(2, 2), "torch.float8_e8m0fnu"),
        (torch.zeros(64, 64).to(torch.float8_e4m3fn), e8m0([[127, 127]]), r"shape \[2, 2\].*half"),
        (torch.zeros(64).to(torch.float8_e4m3fn), e8m0([[127, 127]]), "two dimensions"),
    ],
)
def test_mismatched_pairs_are_refused(weight: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_fp8_blocks(weight, scale)


def test_a_scale_of_blocks_is_refused_for_rows() -> None:
    data = load_file(GOLDEN)
    with pytest.raises(ValueError, match=r"shape \[70, 3\]"):
        decode_fp8_rows(data["fp8_weight"], data["fp8_scale"])
    with pytest.raises(ValueError, match=r"shape \[20, 3\].*found \[40, 3\]"):
        decode_fp4(data["fp4_packed"][:20], data["fp4_scale"])
