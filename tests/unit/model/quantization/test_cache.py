"""Cache quantisers against a slow float64 model of the formats and the reference numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from model.quantization.cache import fp8_fake_quant, mxfp4_fake_quant, nvfp4_fake_quant

GOLDEN = Path(__file__).parents[3] / "golden" / "quantization"
QUANTISERS = {"fp8": fp8_fake_quant, "mxfp4": mxfp4_fake_quant, "nvfp4": nvfp4_fake_quant}
GROUPS = {"fp8": 32, "mxfp4": 32, "nvfp4": 16}
SIGNED = {torch.float32: torch.int32, torch.bfloat16: torch.int16}

# Non-negative values by code, so that the even code wins a tie. E4M3: 126 codes below NaN.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)


def nearest(value: float, levels: np.ndarray) -> float:
    """The closest level, the even code at a tie."""
    distance = np.abs(levels - abs(value))
    codes = np.flatnonzero(distance == distance.min())
    code = codes[0] if codes[0] % 2 == 0 else codes[-1]
    return float(np.copysign(levels[code], value))


def slow_quantise(name: str, group: np.ndarray) -> list[float]:
    """One group by the definition; divisions in float32, as the format prescribes."""
    amax = np.abs(group).max()
    if name == "fp8":
        ratio = np.float32(max(amax, np.float32(1e-4))) / np.float32(448)
        scale, levels = 2.0 ** np.ceil(np.log2(np.float64(ratio))), E4M3
    elif name == "mxfp4":
        ratio = np.float32(max(amax, np.float32(6 * 2.0**-126))) / np.float32(6)
        scale, levels = 2.0 ** np.ceil(np.log2(np.float64(ratio))), E2M1
    else:
        ratio = np.float32(max(amax, np.float32(6 * 2.0**-9))) / np.float32(6)
        scale, levels = nearest(float(min(ratio, 448)), E4M3), E2M1
    quotients = np.clip(group / np.float32(scale), -levels[-1], levels[-1])
    return [float(np.float32(nearest(float(q), levels)) * np.float32(scale)) for q in quotients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTISERS)
def test_reference_numbers_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    data = load_file(GOLDEN / "quant.safetensors")
    expected = data[f"{name}.{str(dtype).removeprefix('torch.')}"]
    got = QUANTISERS[name](data["values"].to(dtype))
    assert got.dtype == dtype
    assert torch.equal(got.view(SIGNED[dtype]), expected.view(SIGNED[dtype]))


@pytest.mark.parametrize("name", QUANTISERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 30), grid=st.booleans())
def test_equals_the_definition(name: str, seed: int, exponent: int, grid: bool) -> None:
    rng = np.random.default_rng(seed)
    # Half of the examples lie on a grid of eighths, where ties are common.
    values = rng.integers(-48, 49, 32) / 8 if grid else rng.standard_normal(32)
    values = (values * 2.0**exponent).astype(np.float32)
    expected = [v for g in values.reshape(-1, GROUPS[name]) for v in slow_quantise(name, g)]
    assert QUANTISERS[name](torch.from_numpy(values)).tolist() == expected


@pytest.mark.parametrize("name", QUANTISERS)
def test_ties_go_to_the_even_code(name: str) -> None:
    group = torch.zeros(GROUPS[name])
    if name == "fp8":
        group[:5] = torch.tensor([448.0, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10])
        assert fp8_fake_quant(group)[:5].tolist() == [448.0, 16.0, 20.0, 0.0, 2.0**-8]
        return
    group[:8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0])
    assert QUANTISERS[name](group)[:8].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0]


@pytest.mark.parametrize("name", QUANTISERS)
def test_scale_covers_a_maximum_one_ulp_above_a_level(name: str) -> None:
    top = 448.0 if name == "fp8" else 6.0
    above = torch.nextafter(torch.tensor(top), torch.tensor(torch.inf))
    group = torch.zeros(GROUPS[name])
    group[0] = above
    assert QUANTISERS[name](group)[0].item() == slow_quantise(name, group.numpy())[0]
    assert QUANTISERS[name](group)[0].item() == top


@pytest.mark.parametrize("name", QUANTISERS)
def test_gradient_passes_straight_through(name: str) -> None:
    x = torch.randn(3, 5, 64, requires_grad=True)
    weight = torch.randn(3, 5, 64)
    (QUANTISERS[name](x) * weight).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("name", QUANTISERS)
def test_input_is_untouched_and_layout_does_not_matter(name: str) -> None:
    base = torch.randn(64, 7, 4)
    strided = base.permute(1, 2, 0)
    before = base.clone()
    assert torch.equal(QUANTISERS[name](strided), QUANTISERS[name](strided.contiguous()))
    assert torch.equal(base, before)


@pytest.mark.parametrize("name", QUANTISERS)
def test_zeros_and_empty_and_nan(name: str) -> None:
    quantise: Callable[[Tensor], Tensor] = QUANTISERS[name]
    assert torch.equal(quantise(torch.zeros(2, 64)), torch.zeros(2, 64))
    assert quantise(torch.zeros(0, 64)).shape == (0, 64)
    poisoned = torch.full((2, 64), 6.0)
    poisoned[1, 3] = torch.nan
    assert quantise(poisoned)[1, 3].isnan()
    assert torch.equal(quantise(poisoned)[0], torch.full((64,), 6.0))


@pytest.mark.parametrize("name", QUANTISERS)
def test_channels_must_fill_the_groups(name: str) -> None:
    with pytest.raises(ValueError, match=f"groups of {GROUPS[name]} channels.*24"):
        QUANTISERS[name](torch.randn(2, 24))


def test_groups_do_not_share_scales() -> None:
    x = torch.cat([torch.full((32,), 1e4), torch.full((32,), 0.37)])
    alone = torch.cat([fp8_fake_quant(x[:32]), fp8_fake_quant(x[32:])])
    assert torch.equal(fp8_fake_quant(x), alone)
