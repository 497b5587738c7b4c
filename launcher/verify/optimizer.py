"""Kind `optimizer`: some steps of a published update rule in fp32, against float64.

case.json names the `rule` and its settings; optim.safetensors holds `weight`, `grads` [steps, ...],
`weight_after` and `momentum_after`.
"""

from __future__ import annotations

import torch

from launcher.verify.case import Case, CaseError, Unsupported
from launcher.verify.gates import Check, within
from trainer.muon import WEIGHT_DECAY, muon_step
from trainer.sinkhorn import sinkhorn_step

LIMIT = 1e-4  # of the weight's whole change, and of the momentum


def check(case: Case) -> list[Check]:
    """Take the steps and compare what the weight gained and the momentum left behind."""
    tensors, rule = case.tensors("optim.safetensors"), case.entry("rule")
    start, grads = tensors["weight"], tensors["grads"].float()
    weight, momentum = start.float(), torch.zeros_like(start, dtype=torch.float32)
    if grads.shape[1:] != start.shape or start.dim() != 2:
        raise CaseError(f"{tensors.path}: grads must be [steps, *weight.shape] of a matrix")
    lr = float(case.entry("lr"))
    for grad in grads:
        if rule == "muon":
            parts = int(case.entry("parts"))
            blocks = (len(start) // parts,) * parts
            muon_step(weight, momentum, grad, lr=lr, weight_decay=WEIGHT_DECAY, blocks=blocks)
        elif rule == "sinkhorn":
            sinkhorn_step(weight, momentum, grad, lr=lr * float(case.entry("mult")))
        else:
            raise Unsupported(f"rule {rule!r} is not known here; known are muon, sinkhorn")
    wanted = tensors["weight_after"] - start
    return [
        within("change", "weight", weight.double() - start, wanted, limit=LIMIT),
        within("momentum", "momentum", momentum, tensors["momentum_after"], limit=LIMIT),
    ]
