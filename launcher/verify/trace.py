"""What every layer of a forward gave, caught by hooks, in rows and columns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.verify.imposed import along_rows
from model.block import BlockOutput
from model.layout import Layout, ModelInputs
from model.transformer import DeepseekV41


@dataclass
class Trace:
    """Detached outputs by reference name ("streams.3"), each [B, W, ...] like the inputs.

    streams and pre_mix after every layer; engram_out, the streams after Engram; topk, the selected
    compressed entries counted along their own row, -1 absent; candidates, bool over those entries.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def tracing(model: DeepseekV41, inputs: ModelInputs) -> Iterator[Trace]:
    """Catch the layers' outputs of a forward over `inputs`, whose width is aligned."""
    trace = Trace()
    handles = []
    for n, layer in enumerate(model.layers):
        hook = _block_hook(trace, model, inputs, n)
        handles.append(layer.register_forward_hook(hook))
        if layer.engram is not None:  # pyright: ignore[reportAttributeAccessIssue]
            handles.append(
                layer.engram.register_forward_hook(  # pyright: ignore
                    _engram_hook(trace, inputs, n)
                )
            )
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _block_hook(trace: Trace, model: DeepseekV41, inputs: ModelInputs, n: int):
    rows, width = inputs.input_ids.shape
    ratio = model.config.ratio(n)

    def hook(_module: object, _args: object, out: BlockOutput) -> None:
        found = trace.outputs
        found[f"streams.{n}"] = out.streams.detach().unflatten(0, (rows, width))
        found[f"pre_mix.{n}"] = out.pre.detach().unflatten(0, (rows, width))
        if out.published is None:
            return
        entries = width // ratio  # of one row
        found[f"topk.{n}"] = along_rows(out.published.selected, rows=rows, entries=entries)
        if n == model.config.candidate_source_layer_id:
            assert out.published.candidates is not None
            end = Layout.of(inputs).visible(ratio).high
            flat = out.published.candidates.entries(0, rows * width, end)
            dense = torch.zeros(rows * width, rows * entries + 1, dtype=torch.bool)
            dense.scatter_(1, flat.where(flat >= 0, rows * entries), True)
            by_row = dense[:, :-1].unflatten(1, (rows, entries)).unflatten(0, (rows, width))
            own = torch.arange(rows)
            found[f"candidates.{n}"] = by_row[own, :, own]

    return hook


def _engram_hook(trace: Trace, inputs: ModelInputs, n: int):
    def hook(_module: object, _args: object, out: tuple[Tensor, Tensor]) -> None:
        streams = out[0].detach().unflatten(0, tuple(inputs.input_ids.shape))
        trace.outputs[f"engram_out.{n}"] = streams

    return hook
