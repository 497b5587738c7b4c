"""Values of a folder's tensors, decoded a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from model.quantization.released import BLOCK, decode_fp4, decode_fp8_blocks, decode_fp8_rows
from model.released.files import WeightsFolder
from model.released.layout import Form, quantised_form, scale_of

_DECODERS = {
    Form.BLOCKS: decode_fp8_blocks,
    Form.FP4: decode_fp4,
    Form.ROWS: decode_fp8_rows,
}

SLICE_VALUES = 1 << 21
"""Values decoded at once. A slice and its temporaries stay below 10 bytes a value: 20 MiB."""


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
    # A scale of blocks serves 32 rows: take them whole, and cut afterwards.
    tall = BLOCK if form is Form.BLOCKS else 1
    first, last = low // tall * tall, min(-(-high // tall) * tall, stored.rows)
    weight = folder.read(name, first, last)
    scale = folder.read(scale_of(name), first // tall, -(-last // tall))
    return decode_stored(weight, scale, form, dtype=dtype)[low - first : high - first]


def decode_stored(weight: Tensor, scale: Tensor, form: Form, *, dtype: torch.dtype) -> Tensor:
    """A quantised weight and its scale, both as stored, as values [R, C] in `dtype`."""
    return _DECODERS[form](weight, scale, dtype=dtype)
