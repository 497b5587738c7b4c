"""One micro-batch by one rank and by a context group: what must come out the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from data.batch import WHOLE, Batch, Images, PackLayout, Stretch
from data.images.spread import spread
from model import layout
from model.config import QatConfig
from model.layout import ModelInputs
from model.parallel.mesh import Mesh, build_mesh
from tests.unit.model.conftest import BASE, Packed, Rig
from tests.unit.model.vision.conftest import BASE as IMAGE_BASE
from tests.unit.model.vision.conftest import Picture, packed_pictures

EXACT = QatConfig(window_fp8=False, main_fp4=False, index_fp4=False)
WEIGHTS = {"balance_loss": 0.3, "index_loss": 0.7}


@dataclass(frozen=True)
class Case:
    """rows of documents, a document a list of token ids and pictures. width: of the rows, least
    possible if None. learnt: the one document that has labels, None for all. changes: to the
    model's configuration. options: the model's own."""

    rows: list[list[list[Any]]]
    width: int | None = None
    learnt: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def rig(self, mesh: Mesh) -> Rig:
        base = IMAGE_BASE if self.pictures else BASE
        config = replace(base, **({"qat": EXACT} | self.changes))
        return Rig(config, mesh=mesh, **({"steady": True} | self.options))

    @property
    def pictures(self) -> bool:
        return any(isinstance(t, Picture) for row in self.rows for doc in row for t in doc)

    def batch(self, rig: Rig, stretch: Stretch = WHOLE) -> Batch:
        pack = packed_pictures if self.pictures else Rig.pack
        packed: Packed = pack(rig, self.rows, width=self.width)
        inputs, images = packed.inputs, packed.inputs.images
        labels = packed.labels
        if self.learnt is not None:
            row, column, length = packed.places[self.learnt]
            labels = torch.full_like(labels, -100)
            labels[row, column : column + length] = packed.labels[row, column : column + length]
        batch = Batch(
            input_ids=inputs.input_ids,
            labels=labels,
            position_ids=inputs.position_ids,
            seq_ids=inputs.seq_ids,
            token_types=inputs.token_types,
            engram_rows=packed.rows,
            images=images and _share(images, stretch),
            sample_ids=(0,) * len(self.rows),
            layout=PackLayout.from_seq_ids(inputs.seq_ids.numpy()),
        )
        return batch.shard(stretch, pad_token_id=rig.config.pad_token_id)


def _share(images: layout.Images, stretch: Stretch) -> Images:
    if stretch == WHOLE:
        return Images(images.patches, images.grids)
    ranks = spread(images.grids, ranks=stretch.ranks)
    own = (ranks == stretch.rank).repeat_interleave(images.grids.prod(1))
    return Images(images.patches[own], images.grids, ranks)


@dataclass(frozen=True)
class Result:
    """Sums over a context group. grads: by name, tables dense. logits: [B, S, V] of whole rows,
    with the columns that were added for the group."""

    figures: dict[str, Tensor]
    grads: dict[str, Tensor]
    logits: Tensor


def compute(case: Case, ranks: int = 1) -> Result:
    """Forward and backward of all losses; by a context group of `ranks`, the default one."""
    mesh = build_mesh(cp=ranks)
    rig = case.rig(mesh)
    batch = case.batch(rig, Stretch(mesh.cp.rank, ranks, rig.config.alignment))
    window = rig.store.open_window([batch.engram_rows])
    inputs, rows = model_inputs(batch), window.rows(0)
    # The balance loss is of all documents, whichever are learnt.
    options = {"balance": case.learnt is None, "recall": True}
    out = rig.model(inputs, engram=rows, labels=batch.labels, **options)
    figures = {
        name: value.detach().double()
        for name, value in out._asdict().items()
        if value is not None and name != "engram_gate_mean"
    }
    alive = (batch.seq_ids > 0) & (batch.token_types < 0)
    figures["gates"] = out.engram_gate_mean.double() * alive.sum()
    loss = out.loss_sum
    for name, weight in WEIGHTS.items():
        if (value := getattr(out, name)) is not None:
            loss = loss + weight * value
    loss.backward()
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in rig.model.named_parameters()
        if p.requires_grad
    }
    tables = zip(rig.store.layers, rig.store.weight, window.ids, window.grads, strict=True)
    for n, table, ids, grad in tables:
        grads[f"table.{n}"] = torch.zeros_like(table).index_copy_(0, ids, grad)
    with torch.no_grad():
        logits = rig.model(inputs, engram=rows).logits
    for tensor in [*figures.values(), *grads.values()]:
        mesh.cp.all_reduce_sum(tensor)
    if ranks > 1:
        logits = mesh.cp.all_gather(logits).transpose(0, 1).flatten(1, 2)
    return Result(figures, grads, logits)


def model_inputs(batch: Batch) -> ModelInputs:
    rows, images = batch.whole or batch, batch.images
    return ModelInputs(
        input_ids=batch.input_ids,
        seq_ids=rows.seq_ids,
        position_ids=rows.position_ids,
        token_types=rows.token_types,
        images=images and layout.Images(images.patches, images.grids, images.ranks),
    )


# Small sums of large terms, and what stands behind a gate whose slope is steep: there a rounding
# error is a larger part.
LOOSE = ("q_weight", "k_weight", "hc_attn.scale", "hc_ffn.scale")


def require_equal(found: Result, wanted: Result, *, limit: float = 1e-5) -> None:
    """Every figure, gradient and logit within `limit` in norm, LOOSE ones within ten times that."""
    assert found.figures.keys() == wanted.figures.keys()
    assert found.grads.keys() == wanted.grads.keys()
    width = wanted.logits.shape[1]
    pairs = {"logits": (found.logits[:, :width], wanted.logits)}
    for kind in ("figures", "grads"):
        one, other = getattr(found, kind), getattr(wanted, kind)
        pairs |= {name: (one[name], other[name]) for name in other}
    errors = {name: relative(*pair) for name, pair in pairs.items()}
    wrong = {n: e for n, e in errors.items() if e > limit * (10 if n.endswith(LOOSE) else 1)}
    assert not wrong, wrong


def relative(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double() - wanted.double()).norm()
    return 0.0 if difference == 0 else float(difference / wanted.double().norm())


def tokens(length: int, seed: int) -> list[int]:
    """A document's ids."""
    return torch.randint(4, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
