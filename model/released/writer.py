"""Safetensors files of known tensors, whose bytes may come in any order."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from model.released.files import DTYPES, INDEX
from model.released.layout import Shape

GB = 10**9


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str  # as safetensors spells it
    shape: Shape

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class _Place(NamedTuple):
    planned: Planned
    file: str
    start: int


class Writer:
    """The shards and the index of one folder. All are made at once, then filled row by row.

    `files`: file name -> its tensors, in the order in which their bytes are to lie.
    """

    def __init__(self, folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
        self.folder = folder
        self.written = 0
        self._left: dict[str, int] = {}
        self._places: dict[str, _Place] = {}
        self._handles: dict[str, int] = {}
        for file, planned in files.items():
            header = _header(planned)
            at = len(header)
            for tensor in planned:
                assert tensor.name not in self._places, tensor.name
                self._places[tensor.name] = _Place(tensor, file, at)
                self._left[tensor.name] = tensor.size
                at += tensor.size
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            self._handles[file] = os.open(folder / file, flags, 0o644)
            _write(self._handles[file], header, 0)
            os.truncate(self._handles[file], at)
        _write_index(folder, files)

    def rows(self, name: str, low: int, values: Tensor) -> None:
        """Entries of a tensor along dim 0 from `low` on, in the dtype that it was planned in."""
        planned = self._places[name].planned
        assert values.dtype == DTYPES[planned.dtype], (planned, values.dtype)
        assert values.shape[1:] == planned.shape[1:], (planned, values.shape)
        row_bytes = planned.size // max(1, planned.shape[0] if planned.shape else 1)
        self.raw(name, low * row_bytes, values.contiguous().view(-1).view(torch.uint8))

    def raw(self, name: str, at: int, data: Tensor) -> None:
        """Bytes [n] uint8 of a tensor from byte `at` on."""
        place = self._places[name]
        assert at + len(data) <= place.planned.size, (place, at, len(data))
        view = memoryview(data.numpy())  # pyright: ignore[reportArgumentType]
        _write(self._handles[place.file], view, place.start + at)
        self._left[name] -= len(data)
        self.written += len(data)

    def finish(self) -> None:
        """Make all of it durable. Every byte must have been written once."""
        unfinished = [name for name, left in self._left.items() if left]
        assert not unfinished, unfinished
        for handle in self._handles.values():
            os.fsync(handle)
        self.close()

    def close(self) -> None:
        """Give the files back, finished or not."""
        while self._handles:
            os.close(self._handles.popitem()[1])


def shards(tensors: Sequence[Planned], *, largest: int) -> dict[str, list[Planned]]:
    """Tensors dealt out in order to files of up to `largest` bytes, named in the usual way."""
    groups: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size
    count = len(groups)
    # Wide types first keeps every tensor aligned to its own width.
    return {
        f"model-{number:05d}-of-{count:05d}.safetensors": sorted(
            group, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name)
        )
        for number, group in enumerate(groups, start=1)
    }


def _header(tensors: Sequence[Planned]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(folder: Path, files: Mapping[str, Sequence[Planned]]) -> None:
    every = [(tensor, file) for file, tensors in files.items() for tensor in tensors]
    index = {
        "metadata": {"total_size": sum(tensor.size for tensor, _ in every)},
        "weight_map": dict(sorted((tensor.name, file) for tensor, file in every)),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count
