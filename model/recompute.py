"""Running a part of the model a second time in backward, to keep nothing of the first but inputs.

The first run builds no graph. Backward runs the part again with gradients, differentiates that
graph and drops it: whatever the part's own functions keep for their backwards lives for one part at
a time. What must not happen twice (choices, look-ups) the caller keeps from the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def run_twice(
    run: Callable[..., tuple[Tensor | None, ...]],
    inputs: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """run(*inputs), computed now without a graph and in backward again with one.

    Its outputs are the tensors that carry gradient. All that it reads with a gradient is among
    `inputs`, which are kept, and `parameters`, leaves. Its second run must give the first one's
    bits; torch.is_grad_enabled() tells the two apart.
    """
    return _Twice.apply(run, len(inputs), *inputs, *parameters)  # pyright: ignore


def as_before(again: Tensor, before: Tensor) -> Tensor:
    """The value `before` of the first run, with the gradient of its repetition `again`."""
    return _AsBefore.apply(again, before)  # pyright: ignore


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, count, *tensors):  # type: ignore[override]
        ctx.run, ctx.parameters = run, tensors[count:]
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        return run(*tensors[:count])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[override]
        inputs = [
            None if t is None else t.detach().requires_grad_(t.requires_grad)
            for t in ctx.saved_tensors
        ]
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output is not None and grad is not None
        ]
        leaves = [*inputs, *ctx.parameters]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
        )
        by_leaf = [next(found) if t is not None and t.requires_grad else None for t in leaves]
        return None, None, *by_leaf


class _AsBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, again, before):  # type: ignore[override]
        return before

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad, None
