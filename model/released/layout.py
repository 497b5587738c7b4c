"""How released checkpoints store each tensor, and how a stored tensor is recognised."""

from __future__ import annotations

import re
from enum import Enum

from model.quantization.released import blocks
from model.released.files import Stored

_BLOCKS = re.compile(
    r"(.*\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)"
    r"|.*\.ffn\.shared_experts\.w[123]"
    r"|.*\.engram\.wkv)\.weight"
)
_FP4 = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")
_ROWS = re.compile(r".*\.engram\.embed\.weight")
# Plain copies keep in fp32 what training keeps in fp32.
_WIDE = re.compile(
    r"head\.weight|.*\.attn\.compressor\.(wkv|wgate)\.weight"
    r"|vision\.(norm|blocks\.\d+\.norm[12])\.weight"
)
_FP32 = re.compile(r".*\.(hc_(attn|ffn)_(fn|base|scale)|attn\.attn_sink|ffn\.gate\.(bias|bias_vl))")

Shape = tuple[int, ...]


class Form(Enum):
    """How the values of one tensor are stored; the last three have a scale beside the weight."""

    BF16 = "bfloat16"
    FP32 = "float32"
    BLOCKS = "FP8 with a scale per 32 x 32 block"
    FP4 = "packed FP4 with a scale per row and 32 columns"
    ROWS = "FP8 with a scale per row and 32 columns"

    @property
    def quantised(self) -> bool:
        return self in (Form.BLOCKS, Form.FP4, Form.ROWS)


def released_form(name: str) -> Form:
    """The form of a tensor of backbone, tables or vision in the released files."""
    for pattern, form in (
        (_FP4, Form.FP4),
        (_BLOCKS, Form.BLOCKS),
        (_ROWS, Form.ROWS),
        (_FP32, Form.FP32),
    ):
        if pattern.fullmatch(name):
            return form
    return Form.BF16


def plain_form(name: str, *, narrow: bool) -> Form:
    """The form of the same tensor in an unquantised copy: fp32, or bf16 where training is too."""
    wide = _FP32.fullmatch(name) or _WIDE.fullmatch(name)
    return Form.BF16 if narrow and not wide else Form.FP32


def scale_of(name: str) -> str:
    """The name of the scale beside a quantised weight."""
    assert name.endswith(".weight"), name
    return name.removesuffix("weight") + "scale"


def stored_tensors(name: str, shape: Shape, form: Form) -> dict[str, tuple[str, Shape]]:
    """What a tensor of this decoded shape is in a file: name -> (safetensors dtype, shape)."""
    if form is Form.BF16 or form is Form.FP32:
        return {name: ("BF16" if form is Form.BF16 else "F32", shape)}
    rows, columns = shape
    scale = ("F8_E8M0", (blocks(rows) if form is Form.BLOCKS else rows, blocks(columns)))
    weight = ("I8", (rows, columns // 2)) if form is Form.FP4 else ("F8_E4M3", shape)
    return {name: weight, scale_of(name): scale}


def quantised_form(weight: Stored) -> Form | None:
    """The form of a stored weight that needs a scale; None for a plain one.

    FP8 is FP8 by rows in an Engram table, by blocks elsewhere.
    """
    if weight.dtype == "I8":
        return Form.FP4
    if weight.dtype == "F8_E4M3":
        return Form.ROWS if _ROWS.fullmatch(weight.name) else Form.BLOCKS
    return None
