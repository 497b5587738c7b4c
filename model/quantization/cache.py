"""Cache quantisers: the rounding that V4.1 trains through, as fast straight-through functions.

Keys, values and index vectors are stored in low precision when the model is served, so the model
is trained with the same rounding in its forward. The backward passes gradients unchanged
(straight-through): rounding has a zero derivative almost everywhere.

    fp8    window keys/values      groups of 32, scale = pow2ceil(max(amax, 1e-4) / 448), E4M3
    mxfp4  index queries and keys  groups of 32, scale = pow2ceil(max(amax, 6 * 2^-126) / 6), E2M1
    nvfp4  compressed keys/values  groups of 16, scale = E4M3(max(amax, 6 * 2^-9) / 6), E2M1

Groups run along the last dimension. All arithmetic is float32; the result is cast back to the
input's dtype. Rounding is to nearest, ties to the even code. NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FP8_GROUP = 32
MXFP4_GROUP = 32
NVFP4_GROUP = 16

_FP8_MAX = 448.0
_FP4_MAX = 6.0
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
# Adding and subtracting 1.5 * 2^23 * step leaves a float32 rounded to a multiple of step, ties to
# even, for |value| < 2^22 * step.
_ROUND_TO_STEP = 1.5 * 2.0**23


def fp8_fake_quant(x: Tensor) -> Tensor:
    """`x` rounded as the FP8 window cache stores it; the gradient passes through unchanged.

    x: [..., C] floating point, C a multiple of 32. Returns the same shape and dtype.
    Raises ValueError when C is not a multiple of 32.
    """
    return _straight_through(x, _fp8_round, FP8_GROUP, "fp8")


def mxfp4_fake_quant(x: Tensor) -> Tensor:
    """`x` rounded as the MXFP4 index cache stores it; the gradient passes through unchanged.

    x: [..., C] floating point, C a multiple of 32. Returns the same shape and dtype.
    Raises ValueError when C is not a multiple of 32.
    """
    return _straight_through(x, _mxfp4_round, MXFP4_GROUP, "mxfp4")


def nvfp4_fake_quant(x: Tensor) -> Tensor:
    """`x` rounded as the NVFP4 compressed cache stores it; the gradient passes through unchanged.

    x: [..., C] floating point, C a multiple of 16. Returns the same shape and dtype.
    Raises ValueError when C is not a multiple of 16.
    """
    return _straight_through(x, _nvfp4_round, NVFP4_GROUP, "nvfp4")


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor], group: int) -> Tensor:
        grouped = x.float().unflatten(-1, (-1, group))
        return rounding(grouped).flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _straight_through(
    x: Tensor, rounding: Callable[[Tensor], Tensor], group: int, name: str
) -> Tensor:
    channels = x.shape[-1]
    if channels % group:
        raise ValueError(
            f"{name} rounds groups of {group} channels, but the last dimension is {channels}; "
            f"choose a multiple of {group} or switch this quantiser off in model.qat"
        )
    if x.numel() == 0:
        return x
    return _StraightThrough.apply(x, rounding, group)  # pyright: ignore[reportReturnType]


def _fp8_round(x: Tensor) -> Tensor:
    # The scale is a power of two, so rounding x / scale to E4M3 (3 mantissa bits, smallest normal
    # 2^-6) and scaling back is rounding x itself, in place of its quotient.
    magnitude = x.abs()
    scale = _pow2_ceil(_ratio(_group_max(magnitude), floor=1e-4, top=_FP8_MAX))
    return _round_mantissa(x, magnitude, smallest_binade=scale.mul_(2.0**-6), mantissa_bits=3)


def _mxfp4_round(x: Tensor) -> Tensor:
    # As for fp8, with E2M1: 1 mantissa bit, smallest normal 1.
    magnitude = x.abs()
    scale = _pow2_ceil(_ratio(_group_max(magnitude), floor=_FP4_MAX * 2.0**-126, top=_FP4_MAX))
    return _round_mantissa(x, magnitude, smallest_binade=scale, mantissa_bits=1)


def _nvfp4_round(x: Tensor) -> Tensor:
    magnitude = x.abs()
    scale = _ratio(_group_max(magnitude), floor=_FP4_MAX * 2.0**-9, top=_FP4_MAX)
    scale = scale.clamp_max_(_FP8_MAX).to(torch.float8_e4m3fn).float()
    quotient = (x / scale).clamp_(-_FP4_MAX, _FP4_MAX)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    torch.abs(quotient, out=magnitude)
    return _round_mantissa(quotient, magnitude, smallest_binade=one, mantissa_bits=1).mul_(scale)


def _group_max(magnitude: Tensor) -> Tensor:
    """Largest of each group [..., 1]. Bits of non-negative floats order as integers do (NaN last),
    and integer reductions are several times faster on a CPU."""
    return magnitude.view(torch.int32).amax(-1, keepdim=True).view(torch.float32)


def _ratio(amax: Tensor, *, floor: float, top: float) -> Tensor:
    """max(amax, floor) / top, in place."""
    # Not by a Python number: on CUDA that multiplies by the reciprocal, and one last bit more at a
    # power of two doubles the scale.
    return amax.clamp_min_(floor).div_(amax.new_full((), top))


def _pow2_ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for positive normal float32 x, from the exponent bits."""
    bits = x.view(torch.int32)
    return bits.add_(_MANTISSA_BITS).bitwise_and_(_EXPONENT_BITS).view(torch.float32)


def _round_mantissa(
    x: Tensor, magnitude: Tensor, *, smallest_binade: Tensor, mantissa_bits: int
) -> Tensor:
    """x rounded to `mantissa_bits`, subnormal below `smallest_binade` (a power of two a group).

    `magnitude` is |x|, a buffer that is overwritten.
    """
    binade = magnitude.view(torch.int32).bitwise_and_(_EXPONENT_BITS).view(torch.float32)
    anchor = torch.maximum(binade, smallest_binade, out=binade)
    anchor.mul_(_ROUND_TO_STEP * 2.0**-mantissa_bits)
    # copysign keeps -0, which the addition loses.
    return torch.add(x, anchor).sub_(anchor).copysign_(x)
