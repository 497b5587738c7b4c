"""From query latents to the grouped output projection, tile by tile.

Memory is bounded by a workspace, never by S: nothing of shape [heads, S, S] or [heads, S, groups]
exists, and neither do the queries or the outputs of a whole sequence, heads * head_dim numbers a
token (at the released sizes six times the hidden size, each). Backward rebuilds a tile's queries
and probabilities from the saved latents, unless one tile takes all tokens: then it is kept (of a
kernel's tile, queries and outputs). At a fixed window and top-k the cost is linear in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.fused import tile_of
from model.attention.tiles import KeyGradients, Keys
from model.rope import turn_, turned


@dataclass(frozen=True)
class AttentionSettings:
    heads: int
    window: int
    groups: int
    workspace_bytes: int


def attend(
    q_latent: Tensor,
    wq_b: Tensor,
    wo_a: Tensor,
    kv: Tensor,
    sink: Tensor,
    *,
    turn: Tensor,
    start: Tensor,
    entries: Tensor | None,
    selected: Tensor | None,
    settings: AttentionSettings,
    with_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention over window keys, selected entries and a sink, in one softmax of scale d^-1/2.

    q_latent [T, q_lora] with wq_b [H*d, q_lora] gives the queries, rotated by turn [T, rope/2]
    complex64. kv [h + T, d] is one head of rotated keys that are the values too, of which up to
    window - 1 stand before the first query's own; sink [H] enters the denominator only. start [T]
    int64 is the first index a query may look at, counted from the first query's own (negative: into
    the h before it), t + 1 where it may look at nothing (its output is 0). entries [G, d] with
    selected [T, K] int64, -1 where absent, or both None. Outputs are rotated back and go through
    wo_a [groups * o_lora, H*d/groups] group by group. Returns [T, groups * o_lora] in q_latent's
    dtype and, `with_mass`, the sum over heads of each selected entry's probability: [T, K] fp32, 0
    where absent, without gradient.
    """
    fixed = turn, start, selected, settings, with_mass
    return _Attend.apply(q_latent, wq_b, wo_a, kv, sink, entries, *fixed)  # pyright: ignore


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx, q_latent, wq_b, wo_a, kv, sink, entries, turn, start, selected, settings, with_mass
    ):
        keys = Keys.of(kv, start, sink, entries, selected, settings.window)
        out = q_latent.new_empty(q_latent.shape[0], wo_a.shape[0])
        log_sum = sink.new_empty(q_latent.shape[0], settings.heads, 1, dtype=torch.float32)
        mass = sink.new_empty(selected.shape, dtype=torch.float32) if with_mass else None
        ctx.kept, size = None, settings.workspace_bytes
        for low, high in keys.tiles(settings.heads, size):
            here = turn[low:high]
            q = queries(q_latent[low:high], wq_b, here, settings)
            tile = tile_of(keys, q, low, workspace_bytes=size)
            log_sum[low:high] = tile.log_sum[: high - low]
            output = tile.output()
            seen = turned(output.to(q_latent.dtype), here.conj())
            out[low:high] = _grouped(seen, wo_a, settings)
            if mass is not None:
                mass[low:high] = tile.mass()
            if high - low == len(q_latent):
                ctx.kept = tile, output
        ctx.settings = settings
        ctx.save_for_backward(
            q_latent, wq_b, wo_a, kv, sink, entries, turn, start, selected, log_sum
        )
        ctx.set_materialize_grads(False)
        if mass is not None:
            ctx.mark_non_differentiable(mass)
        return out, mass

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[override]
        q_latent, wq_b, wo_a, kv, sink, entries, turn, start, selected, log_sum = ctx.saved_tensors
        settings, kind, size = ctx.settings, q_latent.dtype, ctx.settings.workspace_bytes
        keys = Keys.of(kv, start, sink, entries, selected, settings.window)
        into = KeyGradients.zeros(keys)
        grad_latent = torch.empty_like(q_latent)
        grad_wq_b = torch.zeros_like(wq_b, dtype=torch.float32)
        grad_wo_a = torch.zeros_like(wo_a, dtype=torch.float32)
        by_group = grad_wo_a.unflatten(0, (settings.groups, -1))
        for low, high in keys.tiles(settings.heads, size):
            here = turn[low:high]
            if ctx.kept:
                tile, output = ctx.kept
                tile.settle()
            else:
                q = queries(q_latent[low:high], wq_b, here, settings)
                tile = tile_of(keys, q, low, log_sum[low:high], workspace_bytes=size)
                output = tile.output()
            seen = _by_group(turned(output.to(kind), here.conj()), settings)
            by_out = grad[low:high].unflatten(1, (settings.groups, -1)).transpose(0, 1)
            by_group += torch.bmm(by_out.mT, seen)
            by_seen = torch.bmm(by_out, wo_a.unflatten(0, (settings.groups, -1)))
            by_seen = by_seen.transpose(0, 1).reshape(high - low, settings.heads, -1).contiguous()
            by_q = tile.backward(turn_(by_seen, here).float(), output, into).to(kind)
            by_q = turn_(by_q, here.conj()).flatten(1)
            grad_latent[low:high] = by_q @ wq_b
            grad_wq_b += by_q.t() @ q_latent[low:high]
        before = kv.shape[0] - q_latent.shape[0]
        near = into.near[settings.window - 1 - before :][: kv.shape[0]].to(kv.dtype)
        far = None if into.entries is None else into.entries.to(entries.dtype)
        by_weight = grad_wq_b.to(wq_b.dtype), grad_wo_a.to(wo_a.dtype)
        return grad_latent, *by_weight, near, into.sink.to(sink.dtype), far, *[None] * 5


def queries(latent: Tensor, wq_b: Tensor, turn: Tensor, settings: AttentionSettings) -> Tensor:
    """Rotated queries [Q, H, d] of some tokens, in latent's dtype; no gradient passes."""
    return turn_((latent @ wq_b.t()).unflatten(-1, (settings.heads, -1)), turn)


def _by_group(seen: Tensor, settings: AttentionSettings) -> Tensor:
    """[Q, H, d] -> [groups, Q, H*d / groups], a view."""
    return seen.reshape(seen.shape[0], settings.groups, -1).transpose(0, 1)


def _grouped(seen: Tensor, wo_a: Tensor, settings: AttentionSettings) -> Tensor:
    weight = wo_a.unflatten(0, (settings.groups, -1))
    return torch.bmm(_by_group(seen, settings), weight.mT).transpose(0, 1).flatten(1)
