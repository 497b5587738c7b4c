"""torch.compile for single functions of the model, and what happens where it does not work.

Compiled are functions that a fused kernel makes cheaper and that are small enough to compile in
seconds; everything between them stays eager. Sinkhorn's 39 divisions in a row are not among them:
unrolled they take minutes to compile, and come out slower on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from model.block import Block
from model.config import CompileConfig
from model.engram.layer import engram_gate
from model.hyper_connection import expand, read
from model.norm import RMSNorm, rms_norm

Function = Callable[..., Tensor]

# A norm alone is compiled for half a dozen widths, with and without gradients.
MOST_VERSIONS = 64
_said: set[str] = set()


class Compiled:
    """`function`, compiled for each new combination of shapes; as it is once that has failed.

    A compiler's errors come at the first call, and those of the backward pass at the first
    backward, where nothing could catch them: so the first call with gradients runs both on copies
    of its arguments. A failure is told in one line (a logging warning), once for each reason.
    """

    def __init__(self, function: Function, *, name: str) -> None:
        self.function, self.name = function, name
        self._compiled: Function | None = None
        self._proven = self._broken = False

    def __call__(self, *args: Any) -> Tensor:
        if not self._broken:
            try:
                compiled = self._compiled = self._compiled or _compile(self.function)
                if not self._proven and torch.is_grad_enabled():
                    _try_both_ways(compiled, args)
                    self._proven = True
                return compiled(*args)
            except Exception as error:
                # Whatever it is, the plain function below has the last word on the arguments.
                self._broken = True
                _tell(self.name, error)
        return self.function(*args)


def _compile(function: Function) -> Function:
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, MOST_VERSIONS)
    return torch.compile(function, dynamic=False, fullgraph=True)


def _try_both_ways(function: Function, args: tuple[Any, ...]) -> None:
    copies = [
        a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a
        for a in args
    ]
    out = function(*copies)
    leaves = [c for c in copies if isinstance(c, Tensor) and c.requires_grad]
    if leaves:
        torch.autograd.grad(out, leaves, torch.zeros_like(out))


def install(layers: nn.ModuleList, final_norm: RMSNorm, config: CompileConfig) -> None:
    """Use compiled functions where `config` says so, plain ones elsewhere.

    The image tower keeps its own: its shapes change from batch to batch.
    """
    for layer in layers:
        assert isinstance(layer, Block)
        layer.read = _one(read, "hyper_connection", config.hyper_connection)
        layer.expand = _one(expand, "hyper_connection", config.hyper_connection)
        if layer.engram is not None:
            layer.engram.gate = _one(engram_gate, "engram_gate", config.engram_gate)
    for module in [final_norm, *layers.modules()]:
        if isinstance(module, RMSNorm):
            module.function = _one(rms_norm, "norm", config.norm)


def _one(function: Function, name: str, wanted: bool) -> Function:
    return _compiled(function, name) if wanted else function


@cache
def _compiled(function: Function, name: str) -> Compiled:
    return Compiled(function, name=name)


def _tell(name: str, error: Exception) -> None:
    reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    reason = f"{type(error).__name__}: {reason.strip()}"[:200]
    if reason not in _said:
        _said.add(reason)
        logging.getLogger(__name__).warning(
            "model.compile.%s runs uncompiled, as does what else meets this error: %s",
            name,
            reason,
        )
