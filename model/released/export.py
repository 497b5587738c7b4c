"""A model's weights as a folder of safetensors: planned first, then written tensor by tensor.

In the released layout a weight that its source still stands for, block by block, gets the bytes of
the source; so what training left alone comes back byte for byte, whatever quantiser made it.
Draft tensors (`mtp.*`) are copied from the source. Held in memory: one tensor of the model (all
experts of a layer are one), and some 75 MiB for the slice that is being encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from model.names import released_parts
from model.released.decode import slices
from model.released.encode import Tally, encode_rows, has_form
from model.released.files import WeightsFolder
from model.released.layout import Form, Shape, plain_form, released_form, stored_tensors
from model.released.writer import Planned, Writer, shards

Format = Literal["released", "float32", "bfloat16"]
Rows = Callable[[int, int], Tensor]  # rows low..high of a table, decoded

DRAFT = "mtp."
PIECE = 1 << 24  # bytes copied at once


class ModelTensors(Protocol):
    """A model that has been saved: our tensors by name, one at a time in memory."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def load(self, name: str) -> Tensor:
        """The tensor of that name, whole."""
        ...


@dataclass(frozen=True)
class Table:
    """An Engram table that the saved model does not hold.

    rows: its values. folder: where the same table lies as safetensors, if it does.
    """

    shape: Shape
    rows: Rows
    folder: WeightsFolder | None


@dataclass(frozen=True)
class Plan:
    """What will be written.

    forms: by released name. copied: stored tensors whose bytes are another folder's. source: the
    weights that the model started from. draft: whether the draft is among the copied.
    """

    files: dict[str, list[Planned]]
    forms: dict[str, Form]
    copied: dict[str, WeightsFolder]
    source: WeightsFolder | None
    draft: bool

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensors in self.files.values() for tensor in tensors)


def plan_export(
    shapes: Mapping[str, Shape],
    tables: Mapping[str, Table],
    *,
    format: Format,
    source: WeightsFolder | None,
    draft: bool,
    largest: int,
) -> Plan:
    """Name, form and place of everything; nothing is read or written.

    shapes: of our tensors by our names. tables: by released names. draft: with the source's.
    largest: bytes of a shard. When the result has the tensors of the source, it gets its shards.
    """
    wanted: dict[str, Shape] = {}
    for name, shape in shapes.items():
        for part in released_parts(name, shape):
            tail = shape[1:] if part.expert is None else shape[2:]
            wanted[part.name] = (part.rows, *tail)
    wanted |= {name: table.shape for name, table in tables.items()}
    forms = {name: _form(name, format) for name in wanted}
    planned = [
        Planned(part, dtype, size)
        for name, shape in wanted.items()
        for part, (dtype, size) in stored_tensors(name, shape, forms[name]).items()
    ]
    copied: dict[str, WeightsFolder] = {}
    for name, table in tables.items():
        if table.folder is not None and has_form(table.folder, name, table.shape, forms[name]):
            parts = stored_tensors(name, table.shape, forms[name])
            copied |= dict.fromkeys(parts, table.folder)
    if draft:
        assert source is not None
        theirs = [s for name, s in source.tensors.items() if name.startswith(DRAFT)]
        planned += [Planned(s.name, s.dtype, s.shape) for s in theirs]
        copied |= {s.name: source for s in theirs}
    files = (source and _files_of(source, planned)) or shards(planned, largest=largest)
    return Plan(files, forms, copied, source, draft)


def write_export(
    plan: Plan,
    model: ModelTensors,
    tables: Mapping[str, Table],
    *,
    to: Path,
    progress: Callable[[int, int], None],
) -> Tally:
    """Write the planned shards and their index into the folder `to`, and make them durable.

    ValueError names a weight that is NaN or infinite.
    """
    tally = Tally()
    writer = Writer(to, plan.files)

    def weight(name: str, shape: Shape, rows: Rows) -> None:
        form = plan.forms[name]
        source = plan.source
        if source is not None and not has_form(source, name, shape, form):
            source = None
        for low, high in slices(0, shape[0], columns=math.prod(shape[1:])):
            try:
                made = encode_rows(name, low, rows(low, high), form, source=source, tally=tally)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            for part, (first, stored) in made.items():
                writer.rows(part, first, stored)
            progress(writer.written, plan.size)

    try:
        for name in model.shapes:
            tensor = model.load(name)
            for part in released_parts(name, tensor.shape):
                held = part.of(tensor)
                weight(part.name, tuple(held.shape), _rows_of(held))
        for name, table in tables.items():
            if name not in plan.copied:
                weight(name, table.shape, table.rows)
        for name, folder in plan.copied.items():
            done = 0
            for piece in folder.raw(name, at_once=PIECE):
                writer.raw(name, done, piece)
                done += len(piece)
                progress(writer.written, plan.size)
        writer.finish()
    finally:
        writer.close()
    return tally


def _form(name: str, format: Format) -> Form:
    if format == "released":
        return released_form(name)
    return plain_form(name, narrow=format == "bfloat16")


def _rows_of(tensor: Tensor) -> Rows:
    return lambda low, high: tensor[low:high]


def _files_of(source: WeightsFolder, planned: list[Planned]) -> dict[str, list[Planned]] | None:
    """The shards of the source in its order, if it holds just the planned tensors."""
    by_name = {tensor.name: tensor for tensor in planned}
    theirs = {name: Planned(s.name, s.dtype, s.shape) for name, s in source.tensors.items()}
    if by_name != theirs:
        return None
    files: dict[str, list[Planned]] = {file: [] for file in source.files}
    for stored in sorted(source.tensors.values(), key=lambda s: s.start):
        files[stored.file].append(by_name[stored.name])
    return files
