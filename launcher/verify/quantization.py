"""Kind `quantization`: the cache quantisers and the decoders of released weights, exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from launcher.verify.case import Case, CaseError, Tensors
from launcher.verify.gates import Check, exact
from model.quantization.cache import fp8_fake_quant, mxfp4_fake_quant, nvfp4_fake_quant
from model.quantization.released import decode_fp4, decode_fp8_blocks, decode_fp8_rows

QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": fp8_fake_quant,
    "mxfp4": mxfp4_fake_quant,
    "nvfp4": nvfp4_fake_quant,
}
# Decoded tensor: its decoder, stored values and scales.
DECODERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str]] = {
    "fp8_decoded": (decode_fp8_blocks, "fp8_weight", "fp8_scale"),
    "fp4_decoded": (decode_fp4, "fp4_packed", "fp4_scale"),
    "rows_decoded": (decode_fp8_rows, "rows_fp8", "rows_scale"),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check(case: Case) -> list[Check]:
    """Compare every reference output the case holds; `values` is the quantisers' input."""
    tensors = case.tensors("quant.safetensors")
    try:
        return [*_quantised(tensors), *_decoded(tensors)]
    except ValueError as error:
        raise CaseError(f"{tensors.path}: {error}") from None


def _quantised(tensors: Tensors) -> list[Check]:
    checks = []
    for name, quantise in QUANTISERS.items():
        for dtype_name, dtype in DTYPES.items():
            subject = f"{name}.{dtype_name}"
            if subject in tensors:
                ours = quantise(tensors["values"].to(dtype))
                checks.append(exact("quantisers", subject, ours, tensors[subject]))
    return checks


def _decoded(tensors: Tensors) -> list[Check]:
    checks = []
    for subject, (decode, values, scales) in DECODERS.items():
        if subject in tensors:
            ours = decode(tensors[values], tensors[scales])
            checks.append(exact("decoders", subject, ours, tensors[subject]))
    return checks
