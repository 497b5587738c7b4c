"""A folder of safetensors files: what it holds by its headers, and its bytes row by row.

The format: 8 bytes little-endian length of a JSON header, the header (name -> dtype, shape, first
and last byte of the data that follows), the data. A folder holds one model.safetensors, or shards
and model.safetensors.index.json, whose weight_map says which shard holds which tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.released.errors import WeightsError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


class Stored(NamedTuple):
    """One tensor in a file."""

    name: str
    file: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int  # of its bytes in the file
    size: int  # bytes

    @property
    def rows(self) -> int:
        """Entries along dim 0, which lie end to end; 1 for a scalar."""
        return self.shape[0] if self.shape else 1


@dataclass
class WeightsFolder:
    """The tensors of a folder by name. Opened by `open_folder`; only headers have been read.

    problems: what is wrong with the files themselves, a line each. lost: names that the index
    promises in a file that is missing or broken.
    """

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    _handles: dict[str, int] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """Names of the safetensors files, in order."""
        return sorted({stored.file for stored in self.tensors.values()})

    def read(self, name: str, low: int = 0, high: int | None = None) -> Tensor:
        """Entries low..high along dim 0 of a tensor, as stored; up to its end without `high`.

        Takes no memory but the result's: the bytes are read to where they are needed.
        """
        stored = self.tensors[name]
        high = stored.rows if high is None else high
        assert 0 <= low <= high <= stored.rows, (stored, low, high)
        row_bytes = stored.size // max(1, stored.rows)
        buffer = torch.empty((high - low) * row_bytes, dtype=torch.uint8)
        self._read(stored.file, stored.start + low * row_bytes, buffer)
        shape = (high - low, *stored.shape[1:]) if stored.shape else ()
        return buffer.view(DTYPES[stored.dtype]).view(shape)

    def raw(self, name: str, *, at_once: int) -> Iterator[Tensor]:
        """The bytes of a tensor in order, up to `at_once` in each piece."""
        stored = self.tensors[name]
        for done in range(0, stored.size, at_once):
            piece = torch.empty(min(at_once, stored.size - done), dtype=torch.uint8)
            self._read(stored.file, stored.start + done, piece)
            yield piece

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder; None when there is none. WeightsError when it is no object."""
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise WeightsError(self.path, [f"{name} is no JSON: {error}"]) from None
        if not isinstance(found, dict):
            raise WeightsError(self.path, [f"{name} holds no JSON object"])
        return found

    def close(self) -> None:
        """Give the open files back."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _read(self, file: str, at: int, buffer: Tensor) -> None:
        if file not in self._handles:
            self._handles[file] = os.open(self.path / file, os.O_RDONLY | os.O_CLOEXEC)
        view = memoryview(buffer.numpy())  # pyright: ignore[reportArgumentType]
        while len(view):
            count = os.preadv(self._handles[file], [view], at)
            if count == 0:
                raise WeightsError(self.path, [f"{file} has become shorter while it was read"])
            view, at = view[count:], at + count


def open_folder(path: Path) -> WeightsFolder:
    """Read the headers of a folder, or of the snapshot in a Hugging Face cache folder.

    WeightsError when it holds no weights at all; faults of single files go to `problems`.
    """
    folder = WeightsFolder(_snapshot(path))
    index = folder.json(INDEX)
    if index is None:
        if (folder.path / SINGLE).is_file():
            _add(folder, SINGLE, None)
            return folder
        raise WeightsError(folder.path, [_nothing(folder.path)])
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(folder.path, [f"{INDEX} holds no weight_map"])
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(str(file), set()).add(name)
    for file, names in sorted(by_file.items()):
        _add(folder, file, names)
    return folder


def _add(folder: WeightsFolder, file: str, promised: set[str] | None) -> None:
    """The tensors of one file, held against what the index promises of it."""
    try:
        header = read_header(folder.path / file)
    except (ValueError, OSError) as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else str(error)
        lost = f" ({len(promised):,} tensors)" if promised else ""
        folder.problems.append(f"{file} {reason}{lost}")
        folder.lost |= promised or set()
        return
    names = header.keys() if promised is None else promised
    folder.tensors.update((name, header[name]) for name in names if name in header)
    for name in sorted(names - header.keys()):
        folder.problems.append(f"{name} is not in {file}, where the index says it is")
        folder.lost.add(name)
    for name in sorted(header.keys() - names):
        folder.problems.append(f"{name} in {file} is not in the index")


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. ValueError says what is wrong with it; OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"is truncated or no safetensors file: it has {size:,} bytes")
        try:
            header = json.loads(file.read(length))
            found = [
                _stored(name, path.name, entry, 8 + length)
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"has a broken header ({error})") from None
    at = 8 + length
    for stored in sorted(found, key=lambda s: (s.start, s.size)):
        if stored.start != at:
            raise ValueError(f"has a broken header: {stored.name} does not begin where it should")
        at += stored.size
    if at > size:
        raise ValueError(f"is truncated: it has {size:,} bytes of {at:,}")
    if at < size:
        raise ValueError(f"has {size - at:,} bytes more than its header lists")
    return {stored.name: stored for stored in found}


def _stored(name: str, file: str, entry: dict[str, Any], data: int) -> Stored:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has the unknown dtype {dtype}")
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"{name} has a shape or place that is no whole number")
    if last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name} has {last - first:,} bytes for {dtype} {list(shape)}")
    return Stored(name, file, dtype, shape, data + first, last - first)


def _snapshot(path: Path) -> Path:
    """`path`, or the snapshot in it when it is a model's folder in a Hugging Face cache."""
    snapshots = path / "snapshots"
    if not snapshots.is_dir():
        return path
    main = path / "refs" / "main"
    if main.is_file() and (chosen := snapshots / main.read_text().strip()).is_dir():
        return chosen
    found = sorted(p for p in snapshots.iterdir() if p.is_dir())
    if len(found) != 1:
        raise WeightsError(path, [f"{len(found)} snapshots and no refs/main: name one of them"])
    return found[0]


def _nothing(path: Path) -> str:
    if not path.is_dir():
        return "there is no such folder; dsv41 export writes one"
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    if shards:
        return f"{INDEX} is missing beside {shards[0]}"
    return f"it holds neither {INDEX} nor {SINGLE}"
