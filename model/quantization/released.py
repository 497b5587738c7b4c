"""The released low-precision weights: decoders, and encoders that give them back.

Released checkpoints store `X.weight` in 8 or 4 bits with `X.scale` beside it, E8M0: one exponent
byte e for 2^(e - 127), 255 for NaN.

    dense projections   FP8 E4M3 [R, C]             one scale per 32 x 32 block
    routed experts      FP4 E2M1, two per int8      one scale per row and 32 columns
    Engram tables       FP8 E4M3 [rows, head_dim]   one scale per row and 32 columns

A block at the right or lower edge may be cut short. Every decoder checks shapes and dtypes first
and raises ValueError: a wrongly paired scale would otherwise broadcast without a word.

An encoder's scale is the smallest power of two under which the block's largest magnitude rounds
to no more than the format's largest (448 or 6); 1 for a block of zeros. A larger scale would round
that magnitude to the same value and the others no better. With this choice

    decode(encode(x)) == x where some scale represents x: halving a scale doubles the codes, and
    doubled codes stay codes up to the largest;
    encode(decode(encode(x))) gives the same bytes as encode(x).

The bytes of another quantiser need not return: it may have chosen a larger scale.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32

# The largest float32 that rounds to the format's largest value, not to the next one past it.
_E4M3_LIMIT = 464.0  # halfway from 448 to 480, whose code is odd
_E2M1_LIMIT = 7.0 - 2.0**-21  # just below halfway from 6 to 8, whose code is even

# E2M1 by code: sign, two bits of exponent, one of mantissa. Code 8 is read as plain zero.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127  # of E8M0


def decode_fp8_blocks(
    weight: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """A dense projection: FP8 E4M3 values times the scale of their 32 x 32 block.

    weight: float8_e4m3fn [R, C]; scale: float8_e8m0fnu [ceil(R/32), ceil(C/32)].
    Returns [R, C] in `dtype`, rounded once from the exact product. Raises ValueError when shapes
    or dtypes do not belong together.
    """
    _expect(weight, torch.float8_e4m3fn, "FP8 weight")
    rows, columns = weight.shape
    _expect(scale, torch.float8_e8m0fnu, "FP8 scale", (blocks(rows), blocks(columns)))
    per_row = scale.float().repeat_interleave(BLOCK, dim=0)[:rows]
    return _scaled(_e4m3(weight), per_row).to(dtype)


def decode_fp8_rows(weight: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of an Engram table: FP8 E4M3 values times the scale of their row and 32 columns.

    weight: float8_e4m3fn [R, C]; scale: float8_e8m0fnu [R, ceil(C/32)]. Any selection of rows
    decodes alone. Returns [R, C] in `dtype`. Raises ValueError as `decode_fp8_blocks`.
    """
    _expect(weight, torch.float8_e4m3fn, "FP8 table")
    rows, columns = weight.shape
    _expect(scale, torch.float8_e8m0fnu, "FP8 table scale", (rows, blocks(columns)))
    return _scaled(_e4m3(weight), scale.float()).to(dtype)


def decode_fp4(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """A routed expert: FP4 E2M1, the even column in the low nibble of each byte.

    packed: int8 [R, C/2]; scale: float8_e8m0fnu [R, ceil(C/32)]. Returns [R, C] in `dtype`.
    Raises ValueError as `decode_fp8_blocks`.
    """
    _expect(packed, torch.int8, "packed FP4 weight")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _expect(scale, torch.float8_e8m0fnu, "FP4 scale", (rows, blocks(columns)))
    # A pair of values per byte, so that one lookup unpacks both nibbles.
    codes = torch.arange(256, device=packed.device)
    levels = torch.tensor(_E2M1, device=packed.device)
    pairs = torch.stack((levels[codes & 15], levels[codes >> 4]), dim=-1)
    code = packed.view(torch.uint8).flatten().int()
    return _scaled(pairs.index_select(0, code).view(rows, columns), scale.float()).to(dtype)


def encode_fp8_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `decode_fp8_blocks`: values [R, C], any float, finite -> (weight, scale).

    Rounds to nearest, ties to even. ValueError for another number of dimensions, NaN or infinity.
    """
    rows, columns = _finite(values).shape
    padded = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    amax = padded.abs().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax((1, 3))
    exponent = _exponent(amax, _E4M3_LIMIT)
    per_row = exponent.repeat_interleave(BLOCK, dim=0)[:rows]
    return _quotients(values, per_row).to(torch.float8_e4m3fn), _e8m0(exponent)


def encode_fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `decode_fp8_rows`; otherwise as `encode_fp8_blocks`."""
    exponent = _exponent(_amax_by_row(_finite(values)), _E4M3_LIMIT)
    return _quotients(values, exponent).to(torch.float8_e4m3fn), _e8m0(exponent)


def encode_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `decode_fp4`: values [R, C], C even -> (packed int8 [R, C/2], scale).

    Rounds to nearest, ties to the even code; a zero of either sign becomes code 0. ValueError as
    `encode_fp8_blocks`, and for an odd C.
    """
    if _finite(values).shape[1] % 2:
        raise ValueError(f"FP4 packs two columns a byte, but there are {values.shape[1]}")
    exponent = _exponent(_amax_by_row(values), _E2M1_LIMIT)
    quotient = _quotients(values, exponent)
    # Halfway between two levels the even code wins. A bound itself counts as below it, so where
    # the upper code is the even one the bound is the float before the halfway point.
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=values.device)
    halfway[1::2] = torch.nextafter(halfway[1::2], torch.zeros_like(halfway[1::2]))
    code = torch.bucketize(quotient.abs(), halfway, out_int32=True)
    code += ((quotient < 0) & (code > 0)) * 8
    low, high = code.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return (low | (high << 4)).view(torch.int8), _e8m0(exponent)


def blocks(size: int) -> int:
    """How many blocks of 32 cover `size`."""
    return -(-size // BLOCK)


def _e4m3(codes: Tensor) -> Tensor:
    """FP8 codes as fp32, through a table of all 256: seven times as fast as torch's own cast."""
    values = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).float()
    index = codes.reshape(-1).view(torch.uint8).int()
    return values.index_select(0, index).view(codes.shape)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """values [R, C] times scale [R, ceil(C/32)], in place."""
    columns = values.shape[1]
    whole = columns // BLOCK * BLOCK
    values[:, :whole].unflatten(1, (-1, BLOCK)).mul_(scale[:, : whole // BLOCK, None])
    if whole < columns:
        values[:, whole:].mul_(scale[:, -1:])
    return values


def _amax_by_row(values: Tensor) -> Tensor:
    padded = F.pad(values.float(), (0, -values.shape[1] % BLOCK))
    return padded.abs().unflatten(1, (-1, BLOCK)).amax(-1)


def _exponent(amax: Tensor, limit: float) -> Tensor:
    """int32 e of the smallest 2^e with amax <= limit * 2^e, within E8M0's range; 0 for amax 0."""
    mantissa, exponent = torch.frexp(amax)
    limit_mantissa, limit_exponent = math.frexp(limit)
    exponent = exponent - limit_exponent + (mantissa > limit_mantissa).int()
    return torch.where(amax == 0, 0, exponent.clamp(-_BIAS, _BIAS))


def _quotients(values: Tensor, exponent: Tensor) -> Tensor:
    """fp32 values [R, C] over 2^exponent [R, ceil(C/32)]."""
    inverse = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), -exponent)
    return _scaled(values.float().clone(), inverse)


def _e8m0(exponent: Tensor) -> Tensor:
    return (exponent + _BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _finite(values: Tensor) -> Tensor:
    if values.ndim != 2:
        raise ValueError(f"expected two dimensions, found shape {list(values.shape)}")
    if not bool(values.isfinite().all()):
        raise ValueError("NaN or infinity cannot be encoded")
    return values


def _expect(
    tensor: Tensor, dtype: torch.dtype, what: str, shape: tuple[int, int] | None = None
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{what}: expected {dtype}, found {tensor.dtype}")
    if tensor.ndim != 2:
        raise ValueError(f"{what}: expected two dimensions, found shape {list(tensor.shape)}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(
            f"{what}: expected shape {list(shape)} for its weight, found {list(tensor.shape)}; "
            "is this the scale of another tensor, or half of one?"
        )
