"""Kind `model`: a whole forward and backward against the reference's numbers.

Live tokens are compared, since padding computes whatever it computes. Without the cache quantisers
everything must agree closely. With them a last-bit difference can cross a rounding boundary, so a
few tokens may lie further off. In bfloat16 every sum crosses some: outputs are compared by their
cosine, with the reference's selections (`imposed`), and gradients all together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.verify.case import Case, CaseError, Tensors, Unsupported
from launcher.verify.gates import Check, absent, alike, exact, mostly_within, within, zero
from launcher.verify.model_run import Run, run

LAYER_OUTPUTS = r"(streams|pre_mix|engram_out)\.\d+"
SELECTIONS = r"(topk|candidates)\.\d+"
ROWS = r"engram_rows\.\d+"
GRADIENT = "grad."
# The slope of sqrt in the Engram gate makes the reference itself this uncertain.
STEEP = re.compile(r"layers\.\d+\.engram\.[qk]_weight")
STEEP_LIMIT = 1e-4


@dataclass(frozen=True)
class Gates:
    """Limits on relative errors. `share` of the tokens must keep theirs; 1.0 asks it of the whole
    tensor instead, and with `cosine` that is asked for in its place. `together` bounds the error of
    all gradients taken as one vector."""

    tensor: float
    loss: float
    gradient: float
    share: float = 1.0
    together: float | None = None
    cosine: float | None = None


WITHOUT_QUANTISERS = Gates(tensor=2e-5, loss=1e-6, gradient=2e-5, together=5e-6)
WITH_QUANTISERS = Gates(tensor=1e-4, loss=1e-4, gradient=1e-4, share=0.99)
# Bits of the streams that differ also move tokens to other experts, which decides most of a small
# gradient, of an expert with few tokens, say. One that is missing or wrong has an error of 1.
BFLOAT16 = Gates(tensor=1.0, loss=2e-2, gradient=0.95, together=5e-2, cosine=0.9995)


def check(case: Case) -> list[Check]:
    """Run the case and compare every output it holds."""
    narrow = case.document.get("dtype") == "bfloat16"
    reference = case.tensors("outputs.safetensors")
    found = run(case, impose=reference if narrow else None)
    known = re.compile(rf"logits|loss|{LAYER_OUTPUTS}|{SELECTIONS}|{ROWS}|grad\..+")
    if unknown := sorted(name for name in reference if not known.fullmatch(name)):
        raise Unsupported(f"outputs {', '.join(unknown)} are not supported yet")
    gates = WITH_QUANTISERS if case.document.get("qat", True) else WITHOUT_QUANTISERS
    ungated = ""
    if narrow:
        gates, ungated = BFLOAT16, "in bfloat16 a last bit moves a choice"
    elif case.document.get("smallest_topk_gap") == 0:
        ungated = "the reference's choice is a tie"
    return [
        *_tokens(found, reference, gates),
        *_gradients(found.gradients, reference, gates),
        within("loss", "loss", found.loss, reference["loss"].flatten(), limit=gates.loss),
        *_rows(found, reference),
        *_selections(found, reference, ungated=ungated),
    ]


def _tokens(found: Run, reference: Tensors, gates: Gates) -> list[Check]:
    """Logits, and what every layer gave, on live tokens."""
    at = found.documents
    logits = reference["logits"]
    _expect_columns(reference, "logits", at.row, at.case_column)
    checks = [
        _close(
            "logits",
            "logits",
            found.logits[at.row, at.column],
            logits[at.row, at.case_column],
            gates,
        )
    ]
    for name in _named(reference, LAYER_OUTPUTS):
        if name not in found.outputs:
            checks.append(absent("layers", name, "this model has no such layer"))
            continue
        ours, theirs = _live(found, reference, name)
        checks.append(_close("layers", name, ours, theirs, gates))
    return checks


def _gradients(ours: dict[str, Tensor], reference: Tensors, gates: Gates) -> list[Check]:
    names = [name.removeprefix(GRADIENT) for name in reference if name.startswith(GRADIENT)]
    checks, zeros = [], []
    difference = norm = 0.0
    for name in sorted(names):
        theirs = reference[GRADIENT + name]
        if name not in ours:
            checks.append(absent("gradients", name, "this model has no such gradient"))
        elif not theirs.any():
            zeros.append(zero("zero gradients", name, ours[name]))
        else:
            limit = max(gates.gradient, STEEP_LIMIT) if STEEP.fullmatch(name) else gates.gradient
            checks.append(within("gradients", name, ours[name], theirs, limit=limit))
        if name in ours and ours[name].shape == theirs.shape:
            difference += (ours[name].double() - theirs.double()).square().sum().item()
        norm += theirs.double().square().sum().item()
    if gates.together is not None and norm > 0:
        error = (difference / norm) ** 0.5
        gate = f"at most {gates.together:g}"
        passed = error <= gates.together
        checks.append(Check("all gradients", "together", error, passed, gate))
    return checks + zeros


def _rows(found: Run, reference: Tensors) -> list[Check]:
    """Row ids of every position, padding too: a padding token's rows are defined."""
    checks = []
    for name in _named(reference, ROWS):
        if name not in found.outputs:
            checks.append(absent("rows", name, "this model has no such Engram layer"))
            continue
        ours, theirs = found.outputs[name], reference[name]
        columns = min(ours.shape[1], theirs.shape[1])
        checks.append(exact("rows", name, ours[:, :columns], theirs[:, :columns]))
    return checks


def _selections(found: Run, reference: Tensors, *, ungated: str) -> list[Check]:
    """Selected entries as sets, and candidate masks, on live queries."""
    checks = []
    for name in _named(reference, SELECTIONS):
        if name not in found.outputs:
            checks.append(absent("selections", name, "this layer makes no such selection"))
            continue
        ours, theirs = _live(found, reference, name)
        width = max(ours.shape[-1], theirs.shape[-1])
        fill = 0 if theirs.dtype == torch.bool else -1
        ours, theirs = (F.pad(t, (0, width - t.shape[-1]), value=fill) for t in (ours, theirs))
        if theirs.dtype != torch.bool:
            ours, theirs = ours.sort(-1).values, theirs.sort(-1).values
        checks.append(exact("selections", name, ours, theirs, ungated=ungated))
    return checks


def _close(group: str, name: str, ours: Tensor, theirs: Tensor, gates: Gates) -> Check:
    if gates.cosine is not None:
        return alike(group, name, ours, theirs, cosine=gates.cosine)
    if gates.share == 1.0:
        return within(group, name, ours, theirs, limit=gates.tensor)
    return mostly_within(group, name, ours, theirs, limit=gates.tensor, share=gates.share)


def _live(found: Run, reference: Tensors, name: str) -> tuple[Tensor, Tensor]:
    """Ours and theirs at the live tokens, [tokens, ...]; both stand in aligned columns."""
    at = found.documents
    _expect_columns(reference, name, at.row, at.column)
    return found.outputs[name][at.row, at.column], reference[name][at.row, at.column]


def _expect_columns(reference: Tensors, name: str, row: Tensor, column: Tensor) -> None:
    shape = list(reference[name].shape)
    needed = [int(row.max()) + 1, int(column.max()) + 1]
    if len(shape) < 3 or shape[0] < needed[0] or shape[1] < needed[1]:
        raise CaseError(
            f"{reference.path}: {name} has shape {shape}, but the inputs' documents fill "
            f"{needed[0]} rows and {needed[1]} columns"
        )


def _named(reference: Tensors, pattern: str) -> list[str]:
    """Names of this pattern, layer by layer."""
    names = [name for name in reference if re.fullmatch(pattern, name)]
    return sorted(names, key=lambda name: (name.split(".")[0], int(name.split(".")[1])))
