"""SwiGLU with a clamp: silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kernels.library import kernels


class SwigluGradients(NamedTuple):
    by_both: Tensor  # [n, 2I]
    by_weight: Tensor | None  # [n] fp32
    hidden: Tensor  # [n, I], what forward gave


def swiglu(both: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """both [n, 2I], gate then up, before the clamps -> [n, I] in its dtype, each row times its
    fp32 weight [n], if there are weights."""
    if run := kernels(both, width=both.shape[1] // 2):
        hidden = both.new_empty(both.shape[0], both.shape[1] // 2)
        run.run("swiglu_forward", *hidden.shape, limit, both, weight, hidden)
        return hidden
    act = _parts(both, limit).act
    return (act if weight is None else act * weight[:, None]).to(both.dtype)


def swiglu_backward(
    by_hidden: Tensor, both: Tensor, limit: float, weight: Tensor | None = None
) -> SwigluGradients:
    """A clamped value passes no gradient; at the limit it does."""
    by_weight = None
    if run := kernels(both, width=both.shape[1] // 2):
        by_both, hidden = torch.empty_like(both), torch.empty_like(by_hidden)
        by_weight = None if weight is None else torch.empty_like(weight)
        tensors = both, weight, by_hidden, by_both, hidden, by_weight
        run.run("swiglu_backward", *hidden.shape, limit, *tensors)
        return SwigluGradients(by_both, by_weight, hidden)
    by_act, parts = by_hidden.float(), _parts(both, limit)
    hidden = parts.act
    if weight is not None:
        by_weight = (by_act * parts.act).sum(-1)
        by_act, hidden = by_act * weight[:, None], hidden * weight[:, None]
    out = torch.empty_like(both, dtype=torch.float32)
    by_gate, by_up = out.chunk(2, dim=-1)
    torch.mul(by_act, parts.up, out=by_gate)
    torch.ops.aten.silu_backward.grad_input(by_gate, parts.gate, grad_input=by_gate)
    torch.mul(by_act, parts.silu, out=by_up)
    if parts.clamped is not None:
        out.masked_fill_(parts.clamped, 0.0)
    return SwigluGradients(out.to(both.dtype), by_weight, hidden.to(both.dtype))


class _Parts(NamedTuple):
    """fp32, [n, I] each, after the clamps."""

    gate: Tensor
    up: Tensor
    silu: Tensor
    act: Tensor
    clamped: Tensor | None  # [n, 2I] bool, where a clamp has cut gate or up; None: nowhere


def _parts(both: Tensor, limit: float) -> _Parts:
    both, clamped = both.float(), None
    gate, up = both.chunk(2, dim=-1)
    if _may_reach(both, limit):
        clamped = torch.cat([gate > limit, up.abs() > limit], dim=-1)
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    silu = F.silu(gate)
    return _Parts(gate, up, silu, up * silu, clamped)


def _may_reach(both: Tensor, limit: float) -> bool:
    """False when no clamp has anything to do, the usual case: one pass instead of nine.

    Only where reading a number does not make the host wait for a device.
    """
    if both.device.type != "cpu" or both.numel() == 0:
        return True
    low, high = torch.aminmax(both)
    return not (-limit <= float(low) and float(high) <= limit)
