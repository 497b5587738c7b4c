"""Rows of a weight in the form in which it is to be stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.quantization.released import (
    BLOCK,
    blocks,
    encode_fp4,
    encode_fp8_blocks,
    encode_fp8_rows,
)
from model.released.decode import decode_stored
from model.released.files import DTYPES, WeightsFolder
from model.released.layout import Form, Shape, scale_of, stored_tensors

_ENCODERS = {
    Form.BLOCKS: encode_fp8_blocks,
    Form.FP4: encode_fp4,
    Form.ROWS: encode_fp8_rows,
}


@dataclass
class Tally:
    """What quantising did: blocks in all, those with the bytes of the source, and the relative
    error of the values, their norm and the norm of what was rounded off."""

    blocks: int = 0
    kept: int = 0
    square: float = 0.0
    square_error: float = 0.0

    @property
    def error(self) -> float:
        """Root of the relative square error over all quantised values."""
        return (self.square_error / self.square) ** 0.5 if self.square else 0.0


def has_form(folder: WeightsFolder, name: str, shape: Shape, form: Form) -> bool:
    """Whether the folder stores this tensor in just this form."""
    expected = stored_tensors(name, shape, form)
    return all(
        part in folder.tensors
        and (folder.tensors[part].dtype, folder.tensors[part].shape) == described
        for part, described in expected.items()
    )


def encode_rows(
    name: str, low: int, values: Tensor, form: Form, *, source: WeightsFolder | None, tally: Tally
) -> dict[str, tuple[int, Tensor]]:
    """Rows low, low + 1, ... of a weight as stored: name -> (first row there, rows).

    source: a folder that has this tensor in this form. Where one of its blocks stands for just
    these values, its bytes are taken; its quantiser's choice of scale cannot be told from values.
    low: a multiple of 32. ValueError for NaN or infinity.
    """
    if not form.quantised:
        if not bool(values.isfinite().all()):
            raise ValueError("NaN or infinity is no weight")
        ((_, (dtype, _)),) = stored_tensors(name, tuple(values.shape), form).items()
        return {name: (low, values.to(DTYPES[dtype]))}
    assert low % BLOCK == 0
    tall = BLOCK if form is Form.BLOCKS else 1
    scale_low, scale_high = low // tall, -(-(low + len(values)) // tall)
    tally.blocks += (scale_high - scale_low) * blocks(values.shape[1])
    same, theirs = None, None
    if source is not None:
        theirs = (
            source.read(name, low, low + len(values)),
            source.read(scale_of(name), scale_low, scale_high),
        )
        decoded = decode_stored(*theirs, form, dtype=values.dtype)
        same = _block_all(decoded == values, tall)
        tally.kept += int(same.sum())
    if theirs is None or same is None or not bool(same.all()):
        weight, scale = _ENCODERS[form](values)
        if theirs is not None and same is not None:
            weight, scale = _merged(theirs, (weight, scale), same, tall)
    else:
        weight, scale = theirs
    wide = values.float()
    error = decode_stored(weight, scale, form, dtype=torch.float32) - wide
    tally.square += float(wide.square().sum(dtype=torch.float64))
    tally.square_error += float(error.square().sum(dtype=torch.float64))
    return {name: (low, weight), scale_of(name): (scale_low, scale)}


def _block_all(flags: Tensor, tall: int) -> Tensor:
    """Whether all flags of each block of tall x 32 are set; blocks at the edges may be short."""
    missing = (0, -flags.shape[1] % BLOCK, 0, -flags.shape[0] % tall)
    padded = torch.nn.functional.pad(flags, missing, value=True)
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, tall)).all(3).all(1)


def _merged(
    theirs: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor], same: Tensor, tall: int
) -> tuple[Tensor, Tensor]:
    """Their bytes in blocks that are the same, ours elsewhere."""
    weight, scale = (t.view(torch.uint8) for t in ours)
    wide = BLOCK // 2 if ours[0].dtype == torch.int8 else BLOCK  # bytes of a block in one row
    spread = same.repeat_interleave(tall, 0)[: weight.shape[0]]
    spread = spread.repeat_interleave(wide, 1)[:, : weight.shape[1]]
    weight = torch.where(spread, theirs[0].view(torch.uint8), weight)
    scale = torch.where(same, theirs[1].view(torch.uint8), scale)
    return weight.view(ours[0].dtype), scale.view(ours[1].dtype)
