"""SwiGLU with a clamp: silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Parts(NamedTuple):
    """fp32 pieces of silu(min(gate, limit)) * clamp(up, +-limit), [n, I] each, after the clamps."""

    gate: Tensor
    up: Tensor
    silu: Tensor
    act: Tensor
    clamped: Tensor | None  # [n, 2I] bool, where a clamp has cut gate or up; None: nowhere


def swiglu(both: Tensor, limit: float) -> Parts:
    """both [n, 2I]: gate then up, before the clamps."""
    both, clamped = both.float(), None
    gate, up = both.chunk(2, dim=-1)
    if _may_reach(both, limit):
        clamped = torch.cat([gate > limit, up.abs() > limit], dim=-1)
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    silu = F.silu(gate)
    return Parts(gate, up, silu, up * silu, clamped)


def _may_reach(both: Tensor, limit: float) -> bool:
    """False when no clamp has anything to do, the usual case: one pass instead of nine.

    Only where reading a number does not make the host wait for a device.
    """
    if both.device.type != "cpu" or both.numel() == 0:
        return True
    low, high = torch.aminmax(both)
    return not (-limit <= float(low) and float(high) <= limit)


def swiglu_backward(by_act: Tensor, parts: Parts) -> Tensor:
    """Gradient [n, 2I] fp32 of gate and up. A clamped value passes none; at the limit it does."""
    out = by_act.new_empty(by_act.shape[0], 2 * by_act.shape[1])
    by_gate, by_up = out.chunk(2, dim=-1)
    torch.mul(by_act, parts.up, out=by_gate)
    torch.ops.aten.silu_backward.grad_input(by_gate, parts.gate, grad_input=by_gate)
    torch.mul(by_act, parts.silu, out=by_up)
    return out if parts.clamped is None else out.masked_fill_(parts.clamped, 0.0)
