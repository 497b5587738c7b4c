"""Decoders of the released low-precision weights.

Released checkpoints store `X.weight` in 8 or 4 bits with `X.scale` beside it, E8M0: one exponent
byte e for 2^(e - 127), 255 for NaN.

    dense projections   FP8 E4M3 [R, C]             one scale per 32 x 32 block
    routed experts      FP4 E2M1, two per int8      one scale per row and 32 columns
    Engram tables       FP8 E4M3 [rows, head_dim]   one scale per row and 32 columns

A block at the right or lower edge may be cut short. Every decoder checks shapes and dtypes first
and raises ValueError: a wrongly paired scale would otherwise broadcast without a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32

# E2M1 by code: sign, two bits of exponent, one of mantissa. Code 8 is read as plain zero.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


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
    _expect(scale, torch.float8_e8m0fnu, "FP8 scale", (_blocks(rows), _blocks(columns)))
    per_row = scale.float().repeat_interleave(BLOCK, dim=0)[:rows]
    return _scaled(weight.float(), per_row).to(dtype)


def decode_fp8_rows(weight: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of an Engram table: FP8 E4M3 values times the scale of their row and 32 columns.

    weight: float8_e4m3fn [R, C]; scale: float8_e8m0fnu [R, ceil(C/32)]. Any selection of rows
    decodes alone. Returns [R, C] in `dtype`. Raises ValueError as `decode_fp8_blocks`.
    """
    _expect(weight, torch.float8_e4m3fn, "FP8 table")
    rows, columns = weight.shape
    _expect(scale, torch.float8_e8m0fnu, "FP8 table scale", (rows, _blocks(columns)))
    return _scaled(weight.float(), scale.float()).to(dtype)


def decode_fp4(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """A routed expert: FP4 E2M1, the even column in the low nibble of each byte.

    packed: int8 [R, C/2]; scale: float8_e8m0fnu [R, ceil(C/32)]. Returns [R, C] in `dtype`.
    Raises ValueError as `decode_fp8_blocks`.
    """
    _expect(packed, torch.int8, "packed FP4 weight")
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _expect(scale, torch.float8_e8m0fnu, "FP4 scale", (rows, _blocks(columns)))
    # A pair of values per byte, so that one lookup unpacks both nibbles.
    codes = torch.arange(256, device=packed.device)
    levels = torch.tensor(_E2M1, device=packed.device)
    pairs = torch.stack((levels[codes & 15], levels[codes >> 4]), dim=-1)
    values = pairs[packed.view(torch.uint8).int()].flatten(-2)
    return _scaled(values, scale.float()).to(dtype)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    """values [R, C] times scale [R, ceil(C/32)], in place."""
    columns = values.shape[1]
    whole = columns // BLOCK * BLOCK
    values[:, :whole].unflatten(1, (-1, BLOCK)).mul_(scale[:, : whole // BLOCK, None])
    if whole < columns:
        values[:, whole:].mul_(scale[:, -1:])
    return values


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


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
