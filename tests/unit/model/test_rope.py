"""Rotary positions against their formulas in python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from model.config import RopeScaling
from model.rope import plain_frequencies, rotate, rotation, turned, yarn_frequencies

pytestmark = pytest.mark.usefixtures("each_way")


def yarn(dim: int, theta: float, y: RopeScaling) -> list[float]:
    """The ramp, channel pair by channel pair."""

    def c(turns: float) -> float:
        return (
            dim
            * math.log(y.original_max_position_embeddings / (2 * math.pi * turns))
            / (2 * math.log(theta))
        )

    low, high = max(math.floor(c(y.beta_fast)), 0), min(math.ceil(c(y.beta_slow)), dim - 1)
    out = []
    for i in range(dim // 2):
        f = theta ** (-2 * i / dim)
        ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
        out.append(f / y.factor * ramp + f * (1 - ramp))
    return out


def test_plain_frequencies(make_config: Callable) -> None:
    found = plain_frequencies(make_config(rope_theta=500.0))
    assert found.tolist() == pytest.approx([500.0 ** (-2 * i / 16) for i in range(8)], rel=1e-6)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (160000.0, RopeScaling()),
        (160000.0, RopeScaling(factor=4.0, beta_fast=64.0, beta_slow=0.5)),
        # c(beta_slow) lies past the last channel: high stops at dim - 1.
        (10.0, RopeScaling(original_max_position_embeddings=10**9)),
        # No channel turns beta_fast times: low stops at 0.
        (160000.0, RopeScaling(original_max_position_embeddings=100)),
        # Both ends meet; the ramp becomes a step instead of a division by zero.
        (160000.0, RopeScaling(original_max_position_embeddings=6)),
        (2.0, RopeScaling(original_max_position_embeddings=10**9)),
    ],
)
def test_yarn_frequencies(make_config: Callable, theta: float, scaling: RopeScaling) -> None:
    config = make_config(compress_rope_theta=theta, rope_scaling=scaling)
    found = yarn_frequencies(config)
    assert found.isfinite().all()
    assert found.tolist() == pytest.approx(yarn(16, theta, scaling), rel=2e-6)


def test_the_upper_bound_is_the_rope_dim_not_the_number_of_pairs(make_config: Callable) -> None:
    """With high cut to 15, the last pair (7) is only part of the way up the ramp from low = 0."""
    scaling = RopeScaling(
        factor=16.0, beta_fast=1e8, beta_slow=1.0, original_max_position_embeddings=10**9
    )
    config = make_config(compress_rope_theta=10.0, rope_scaling=scaling)
    low = math.floor(16 * math.log(10**9 / (2 * math.pi * 1e8)) / (2 * math.log(10.0)))
    share = (7 - low) / (15 - low)
    plain = 10.0 ** (-14 / 16)
    wanted = plain / 16 * share + plain * (1 - share)
    assert 0 < share < 1
    assert float(yarn_frequencies(config)[7]) == pytest.approx(wanted, rel=1e-5)


def test_fast_channels_keep_their_frequency_and_slow_ones_are_divided(
    make_config: Callable,
) -> None:
    config = make_config(
        compress_rope_theta=160000.0, qk_rope_head_dim=32, rope_scaling=RopeScaling()
    )
    plain = [160000.0 ** (-2 * i / 32) for i in range(16)]
    found = yarn_frequencies(config).tolist()
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    assert found[15] == pytest.approx(plain[15] / 16, rel=1e-6)


def test_rotate_turns_adjacent_pairs_of_the_last_channels() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 10, generator=generator)
    frequencies, position = torch.tensor([1.0, 0.3, 0.01]), torch.tensor([0, 1, 2, 900, 7])
    found = rotate(x, rotation(frequencies, position))
    assert torch.equal(found[..., :4], x[..., :4])
    for t in range(5):
        for h in range(3):
            for i in range(3):
                angle = position[t].item() * frequencies[i].item()
                a, b = x[t, h, 4 + 2 * i].item(), x[t, h, 5 + 2 * i].item()
                pair = found[t, h, 4 + 2 * i : 6 + 2 * i].tolist()
                turned_pair = [
                    a * math.cos(angle) - b * math.sin(angle),
                    a * math.sin(angle) + b * math.cos(angle),
                ]
                assert pair == pytest.approx(turned_pair, abs=2e-4)


def test_the_conjugate_turns_back_and_is_the_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, 8, generator=generator, requires_grad=True)
    grad = torch.randn(6, 2, 8, generator=generator)
    turn = rotation(torch.tensor([0.7, 0.2, 0.05]), torch.arange(6))
    y = rotate(x, turn)
    torch.testing.assert_close(rotate(y, turn.conj()), x)
    y.backward(grad)
    assert x.grad is not None
    # A rotation is orthogonal, so its transpose is its inverse.
    torch.testing.assert_close(x.grad, turned(grad, turn.conj()))
    matrix = torch.autograd.functional.jacobian(lambda v: rotate(v, turn), x.detach())
    wanted = (grad.flatten() @ matrix.reshape(96, 96)).view_as(x)  # type: ignore[union-attr]
    torch.testing.assert_close(x.grad, wanted)


def test_rotate_leaves_its_input_and_type_alone() -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    before = x.clone()
    found = rotate(x, rotation(torch.tensor([0.5]), torch.arange(4)))
    assert found.dtype == torch.bfloat16
    assert torch.equal(x, before)
    exact = rotate(x.float(), rotation(torch.tensor([0.5]), torch.arange(4)))
    assert torch.equal(found, exact.bfloat16())
