"""Values of a folder's tensors, decoded a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from model.quantization.released import BLOCK, decode_fp4, decode_fp8_blocks, decode_fp8_rows
from model.released.files import WeightsFolder
from model.released.layout import Form, quantised_form, scale_of

SLICE_VALUES = 1 << 21
"""Values decoded at once. A slice and its temporaries stay below 13 bytes a value: 26 MiB."""


def slices(low: int, high: int, *, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of up to SLICE_VALUES values that make up low..high.

    They end at multiples of 32 where they can, so that no block of scales is read twice.
    """
    rows = max(BLOCK, SLICE_VALUES // max(1, columns) // BLOCK * BLOCK)
    while low < high:
        end = min(high, low // rows * rows + rows)
        yield low, end
        low = end


def decode_rows(
    folder: WeightsFolder, name: str, low: int, high: int, *, dtype: torch.dtype
) -> Tensor:
    """Entries low..high along dim 0 of a tensor that `audit` found in order, in `dtype`."""
    stored = folder.tensors[name]
    form = quantised_form(stored)
    if form is None:
        return folder.read(name, low, high).to(dtype)
    scale = scale_of(name)
    if form is Form.BLOCKS:
        first = low // BLOCK * BLOCK
        last = min(-(-high // BLOCK) * BLOCK, stored.rows)
        weight = folder.read(name, first, last)
        per_block = folder.read(scale, first // BLOCK, -(-last // BLOCK))
        return decode_fp8_blocks(weight, per_block, dtype=dtype)[low - first : high - first]
    decode = decode_fp4 if form is Form.FP4 else decode_fp8_rows
    return decode(folder.read(name, low, high), folder.read(scale, low, high), dtype=dtype)
