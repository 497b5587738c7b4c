"""Comparisons with a reference, each with its gate. A figure that is not finite never passes.

Errors are relative: the norm of the difference over the norm of the reference, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Check:
    """One comparison. `group` is the heading it is reported under, `subject` the tensor.

    `error` is the relative error of a tolerance gate, the number of differing elements of an exact
    one; `total` is the number of elements of an exact comparison and None otherwise. `gate` says
    what was asked for, or why the comparison could not be made.
    """

    group: str
    subject: str
    error: float
    passed: bool
    gate: str
    total: int | None = None


def within(group: str, subject: str, ours: Tensor, reference: Tensor, *, limit: float) -> Check:
    """The whole tensor's relative error is at most `limit`."""
    if problem := _shapes_differ(ours, reference):
        return Check(group, subject, math.inf, False, problem)
    error = _relative(ours.flatten(), reference.flatten()).item()
    return Check(group, subject, error, error <= limit, f"at most {limit:g}")


def mostly_within(
    group: str, subject: str, ours: Tensor, reference: Tensor, *, limit: float, share: float
) -> Check:
    """At least `share` of the tokens (dimension 0) have a relative error of at most `limit`."""
    if problem := _shapes_differ(ours, reference):
        return Check(group, subject, math.inf, False, problem)
    error = _relative(ours.flatten(), reference.flatten()).item()
    inside = int((_relative(ours.flatten(1), reference.flatten(1)) <= limit).sum())
    gate = f"{inside} of {len(ours)} tokens within {limit:g}, needs {share:.0%}"
    return Check(group, subject, error, inside >= share * len(ours), gate)


def alike(group: str, subject: str, ours: Tensor, reference: Tensor, *, cosine: float) -> Check:
    """The whole tensor's cosine with the reference is at least `cosine`; the error is 1 - it."""
    if problem := _shapes_differ(ours, reference):
        return Check(group, subject, math.inf, False, problem)
    found = torch.cosine_similarity(ours.double().flatten(), reference.double().flatten(), dim=0)
    return Check(group, subject, 1 - found.item(), found.item() >= cosine, f"cosine {cosine:g}")


def exact(group: str, subject: str, ours: Tensor, reference: Tensor, *, ungated: str = "") -> Check:
    """Every element is equal (NaN to NaN, and 0 to -0). `ungated`: why it is only counted."""
    if problem := _shapes_differ(ours, reference):
        return Check(group, subject, reference.numel(), False, problem, reference.numel())
    equal = ours == reference
    if reference.is_floating_point():
        equal |= ours.isnan() & reference.isnan()
    differ = reference.numel() - int(equal.sum())
    gate = f"not gated: {ungated}" if ungated else "exact"
    passed = differ == 0 or bool(ungated)
    return Check(group, subject, differ, passed, gate, reference.numel())


def zero(group: str, subject: str, ours: Tensor) -> Check:
    """The reference is zero everywhere, so ours must be."""
    differ = int((ours != 0).sum())
    return Check(group, subject, differ, differ == 0, "zero as in the reference", ours.numel())


def absent(group: str, subject: str, why: str) -> Check:
    """The reference has this and we computed nothing to compare."""
    return Check(group, subject, math.inf, False, why)


def _relative(ours: Tensor, reference: Tensor) -> Tensor:
    """Norm of the difference over norm of the reference, along the last dimension; 0/0 is 0."""
    reference = reference.double()
    difference = torch.linalg.vector_norm(ours.double() - reference, dim=-1)
    return torch.where(
        difference == 0, 0.0, difference / torch.linalg.vector_norm(reference, dim=-1)
    )


def _shapes_differ(ours: Tensor, reference: Tensor) -> str:
    if ours.shape == reference.shape:
        return ""
    return f"shape {list(ours.shape)} instead of {list(reference.shape)}"
