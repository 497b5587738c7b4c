"""Whole model: no tensor grows faster than the tokens, whatever the sequence length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that an operation gave back, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.shape = torch.Size()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.numel() > self.numel:
                self.numel, self.shape = t.numel(), t.shape
        return out


def test_the_largest_tensor_grows_with_tokens_not_their_square(
    make_config: Callable, make_rig: Callable
) -> None:
    rig = make_rig(make_config(workspace_mb=1), distill=True)
    largest = {}
    for tokens in (512, 1024):
        ids = torch.randint(3, 400, (tokens,), generator=torch.Generator().manual_seed(0))
        packed = rig.pack([[ids.tolist()]])
        window = rig.store.open_window([packed.rows])
        with Largest() as mode:
            out = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels, recall=True)
            (out.loss_sum + out.index_loss).backward()
        assert window.grads[0].any()
        largest[tokens] = mode.numel
    assert largest[1024] <= 2.1 * largest[512]
    heads, groups = 8, 1024 // 2
    assert largest[1024] < heads * 1024 * groups // 8 < heads * 1024 * 1024 // 8


def test_packed_documents_cost_no_more_than_they_do_alone(
    make_config: Callable, make_rig: Callable
) -> None:
    """Index scores are the only quadratic work, and that in the length of a document."""
    rig = make_rig(make_config())
    documents = [
        torch.randint(3, 400, (256,), generator=torch.Generator().manual_seed(n)).tolist()
        for n in range(4)
    ]
    flops = []
    for rows in ([documents[:1]], [documents]):
        packed = rig.pack(rows)
        window = rig.store.open_window([packed.rows])
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            rig.model(packed.inputs, engram=window.rows(0))
        flops.append(counter.get_total_flops())
    assert flops[0] > 0
    assert flops[1] < 4.1 * flops[0]
