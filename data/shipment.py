"""An object full of tensors as one block of shared memory: how batches come out of workers."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Place = tuple[torch.dtype, tuple[int, ...], int]  # and where its bytes begin
ALIGNMENT = 64  # bytes: no type needs more, and a cache line is that long


@dataclass(frozen=True, eq=False)
class Shipment:
    """The object pickled without its tensors, and their bytes in one shared tensor.

    By itself torch sends every tensor through a connection of its own, which takes longer than the
    making of a small batch.
    """

    skeleton: bytes
    buffer: Tensor

    @classmethod
    def of(cls, value: object) -> Shipment:
        """Copies all CPU tensors in `value` into shared memory."""
        skeleton = io.BytesIO()
        aside = _Aside(skeleton)
        aside.dump(value)
        # Asked for directly; Tensor.share_memory_() would fill pages only to copy them.
        storage = torch.UntypedStorage._new_shared(max(aside.size, 1))
        buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
        for tensor, place in aside.tensors:
            _view(buffer, *place).copy_(tensor)
        return cls(skeleton.getvalue(), buffer)

    def pin_memory(self) -> Shipment:
        """A copy in page-locked memory; torch's loader asks for it by this name."""
        return Shipment(self.skeleton, self.buffer.pin_memory())

    def unpack(self) -> Any:
        """The object, its tensors views of the buffer."""
        return _Back(self.skeleton, self.buffer).load()


class _Aside(pickle.Pickler):
    """Pickles with tensors put aside, and plans where in a buffer each of them goes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Tensor, Place]] = []
        self.size = 0

    def persistent_id(self, obj: object) -> Place | None:
        if not isinstance(obj, Tensor):
            return None
        place = obj.dtype, tuple(obj.shape), self.size
        self.tensors.append((obj, place))
        self.size += -(-obj.nbytes // ALIGNMENT) * ALIGNMENT
        return place


class _Back(pickle.Unpickler):
    """Unpickles with tensors that are views of the buffer."""

    def __init__(self, skeleton: bytes, buffer: Tensor) -> None:
        super().__init__(io.BytesIO(skeleton))
        self._buffer = buffer

    def persistent_load(self, pid: Place) -> Tensor:
        return _view(self._buffer, *pid)


def _view(buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return buffer[start : start + size].view(dtype).view(shape)
