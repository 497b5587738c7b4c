"""Released tensor names and ours: one rule each way.

Ours follow the released ones but for three things: the mHC parameters live in modules
(`hc_attn.fn`, released `hc_attn_fn`); an expert's gate and up rows are one matrix and the routed
experts are stacked (`ffn.experts.w13` [E, 2I, D], released `ffn.experts.E.{w1,w3}.weight`); and
Engram tables (`layers.N.engram.embed.weight`) live in the store, outside the module tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.engram.owners import OwnerStore
from model.engram.window import Window
from model.transformer import DeepseekV41


class Part(NamedTuple):
    """One released tensor as a part of one of ours: `ours[expert][row : row + rows]`."""

    name: str
    expert: int | None  # index on dim 0 of a stack of experts
    row: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`, a view."""
        whole = tensor if self.expert is None else tensor[self.expert]
        return whole[self.row : self.row + self.rows]


def released_parts(name: str, shape: Sequence[int]) -> Iterator[Part]:
    """The released tensors that our tensor `name` of this shape consists of."""
    if m := re.fullmatch(r"(.*\.ffn\.experts)\.(w13|w2)", name):
        for e in range(shape[0]):
            yield from _expert_parts(f"{m[1]}.{e}", m[2], e, shape[1])
    elif m := re.fullmatch(r"(.*\.ffn\.shared_experts)\.(w13|w2)\.weight", name):
        yield from _expert_parts(m[1], m[2], None, shape[0])
    else:
        yield Part(re.sub(r"\.hc_(attn|ffn)\.", r".hc_\1_", name), None, 0, shape[0])


def _expert_parts(prefix: str, operand: str, expert: int | None, rows: int) -> Iterator[Part]:
    if operand == "w2":
        yield Part(f"{prefix}.w2.weight", expert, 0, rows)
        return
    yield Part(f"{prefix}.w1.weight", expert, 0, rows // 2)
    yield Part(f"{prefix}.w3.weight", expert, rows // 2, rows // 2)


def released_slots(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The released (name, slice of `tensor`) pairs that our tensor `name` consists of."""
    for part in released_parts(name, tensor.shape):
        yield part.name, part.of(tensor)


def table_name(layer: int) -> str:
    """The released name of an Engram layer's table."""
    return f"layers.{layer}.engram.embed.weight"


def released_gradients(model: DeepseekV41, store: OwnerStore, window: Window) -> dict[str, Tensor]:
    """Gradients by released name, tables dense; parameters without a gradient are left out."""
    out = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            out.update(released_slots(name, parameter.grad))
    for n, weight, ids, grad in zip(
        store.layers, store.weight, window.ids, window.grads, strict=True
    ):
        dense = torch.zeros_like(weight, dtype=torch.float32)
        out[table_name(n)] = dense.index_copy_(0, ids, grad)
    return out
