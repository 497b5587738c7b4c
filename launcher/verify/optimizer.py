"""Kind `optimizer`: some steps of a published update rule in fp32, against float64.

case.json names the `rule` and its settings; optim.safetensors holds `weight`, `grads` [steps, ...],
`weight_after` and `momentum_after`.
"""

from __future__ import annotations

from torch import nn

from launcher.verify.case import Case, CaseError, Unsupported
from launcher.verify.gates import Check, within
from trainer.muon import Muon
from trainer.sinkhorn import Sinkhorn

LIMIT = 1e-4  # of the weight's whole change, and of the momentum


def check(case: Case) -> list[Check]:
    """Take the steps and compare what the weight gained and the momentum left behind."""
    tensors, rule = case.tensors("optim.safetensors"), case.entry("rule")
    start, grads = tensors["weight"], tensors["grads"].float()
    if grads.shape[1:] != start.shape or start.dim() != 2:
        raise CaseError(f"{tensors.path}: grads must be [steps, *weight.shape] of a matrix")
    weight, lr = nn.Parameter(start.float().clone()), float(case.entry("lr"))
    named = [("weight", weight)]
    if rule == "muon":
        parts = int(case.entry("parts"))
        optimizer = Muon(named, [(len(start) // parts,) * parts], lr=lr)
    elif rule == "sinkhorn":
        optimizer = Sinkhorn(named, lr=lr * float(case.entry("mult")))
    else:
        raise Unsupported(f"rule {rule!r} is not known here; known are muon, sinkhorn")
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    momentum, change = optimizer.state[weight]["momentum"], weight.detach().double() - start
    wanted = tensors["weight_after"] - start
    return [
        within("change", "weight", change, wanted, limit=LIMIT),
        within("momentum", "momentum", momentum, tensors["momentum_after"], limit=LIMIT),
    ]
