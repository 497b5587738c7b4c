"""Released weights straight into a model's own tensors, or into one rank's share of them.

Nothing is held but the model itself and one slice (`decode.SLICE_VALUES` values): each released
tensor is read, decoded and copied a few rows at a time, and only the rows that are wanted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from model.engram.owners import OwnerStore
from model.names import Part, released_parts, table_name
from model.released.audit import audit
from model.released.decode import decode_rows, slices
from model.released.errors import WeightsError
from model.released.files import WeightsFolder, open_folder
from model.released.layout import Shape

Progress = Callable[[int, int], None]  # values done, values in all


@dataclass(frozen=True)
class Target:
    """One of our tensors, whole, or the box of it that this rank holds."""

    name: str
    tensor: Tensor  # what is held here
    shape: Shape  # of the whole
    offset: Shape  # where in the whole `tensor` begins

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Target:
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """(released name, first row there, the rows held here as a view) that make it up."""
        for part in released_parts(self.name, self.shape):
            held, first = self.tensor, self.offset[0]
            if part.expert is not None:
                if not 0 <= part.expert - self.offset[0] < self.tensor.shape[0]:
                    continue
                held, first = self.tensor[part.expert - self.offset[0]], self.offset[1]
            low = max(part.row, first)
            high = min(part.row + part.rows, first + held.shape[0])
            if low < high:
                yield part.name, low - part.row, held[low - first : high - first]


def targets_of(model: nn.Module) -> list[Target]:
    """Every parameter and buffer of a model that is whole in this process."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [Target.whole(name, tensor.detach()) for name, tensor in tensors]


def tables_of(store: OwnerStore) -> list[Target]:
    """The rows of the tables that a store holds in this process."""
    tables = zip(store.layers, store.weight, store.rows, store.low, strict=True)
    return [
        Target(table_name(layer), weight, (rows, weight.shape[1]), (low, 0))
        for layer, weight, rows, low in tables
    ]


def wanted_shapes(targets: Sequence[Target]) -> dict[str, Shape]:
    """Decoded shape by released name of all that the targets are made of, held here or not."""
    return {
        part.name: (part.rows, *shape[1:]) for target in targets for part, shape in _parts(target)
    }


def load_folder(
    path: Path,
    targets: Sequence[Target],
    *,
    unread: Callable[[str], bool],
    progress: Progress = lambda done, total: None,
) -> None:
    """Fill the targets from the folder `path`, which must hold them and, `unread` aside, no more.

    WeightsError lists everything that is wrong with it; see `audit` and `load`.
    """
    folder = open_folder(path)
    try:
        if found := audit(folder, wanted_shapes(targets), unread=unread):
            raise WeightsError(folder.path, found)
        load(folder, targets, progress=progress)
    finally:
        folder.close()


@torch.no_grad()
def load(folder: WeightsFolder, targets: Sequence[Target], *, progress: Progress) -> None:
    """Fill the targets from a folder that `audit` found in order.

    Raises WeightsError naming every tensor with a value that is not finite, after all have been
    read; the targets are of no use then.
    """
    total = sum(t.tensor.numel() for t in targets)
    done, bad = 0, []
    for target in targets:
        for name, first, held in target.pieces():
            columns = math.prod(held.shape[1:])
            wrong = 0
            for low, high in slices(first, first + held.shape[0], columns=columns):
                values = decode_rows(folder, name, low, high, dtype=held.dtype)
                held[low - first : high - first].copy_(values)
                if not bool(values.sum(dtype=torch.float32).isfinite()):
                    wrong += int((~values.isfinite()).sum())
                done += values.numel()
                progress(done, total)
            if wrong:
                file = folder.tensors[name].file
                bad.append(f"{name} in {file} holds {wrong:,} values that are NaN or infinite")
    if bad:
        raise WeightsError(folder.path, bad)


def _parts(target: Target) -> Iterator[tuple[Part, Shape]]:
    for part in released_parts(target.name, target.shape):
        yield part, target.shape if part.expert is None else target.shape[1:]
