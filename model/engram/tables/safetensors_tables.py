"""Engram tables in safetensors files: the released FP8 ones, and unquantised ones."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.engram.tables.mapped_rows import MappedRows
from model.engram.tables.table import Table
from model.quantization.released import BLOCK, decode_fp8_rows

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1}
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: dtype as safetensors names it, shape, and its first byte in `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class TensorFiles:
    """The tensors of one safetensors file, or of a folder with an index; headers are read once."""

    def __init__(self, path: Path) -> None:
        """ValueError, naming the file and what to give instead, when there is none to read."""
        self._headers: dict[Path, dict[str, Entry]] = {}
        if path.is_file():
            self._file_of = dict.fromkeys(self._header(path), path)
        elif (path / INDEX).is_file():
            self._file_of = {name: path / file for name, file in _index(path / INDEX).items()}
        elif (path / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._header(path / SINGLE), path / SINGLE)
        else:
            raise ValueError(
                f"{path} holds no {INDEX} and no {SINGLE}; give a folder of a released model, "
                "a .safetensors file or a .gguf file"
            )

    def find(self, name: str) -> Entry | None:
        """The tensor of that name, or None. ValueError when its file is missing or unreadable."""
        path = self._file_of.get(name)
        if path is None:
            return None
        entry = self._header(path).get(name)
        if entry is None:
            raise ValueError(f"{path} does not hold {name}, which the index says it does")
        return entry

    def _header(self, path: Path) -> dict[str, Entry]:
        if path not in self._headers:
            self._headers[path] = _read_header(path)
        return self._headers[path]


def find_table(
    files: TensorFiles, name: str, *, rows: int, dim: int, dtype: torch.dtype
) -> tuple[Table | None, list[str]]:
    """The table `name` [rows, dim], decoded to `dtype`, or everything wrong with it."""
    scale_name = name.removesuffix(".weight") + ".scale"
    try:
        weight, scale = files.find(name), files.find(scale_name)
    except (ValueError, OSError) as error:
        return None, [str(error)]
    if weight is None:
        return None, [f"{name} is missing"]
    found = _shape_problems(name, weight, (rows, dim))
    if weight.dtype == "F8_E4M3":
        if scale is None:
            found.append(f"{scale_name} is missing beside the FP8 table {name}")
        else:
            found += _shape_problems(scale_name, scale, (rows, -(-dim // BLOCK)))
            if scale.dtype != "F8_E8M0":
                found.append(f"{scale_name} is {scale.dtype}, not F8_E8M0")
    elif weight.dtype not in PLAIN:
        found.append(f"{name} is {weight.dtype}; a table is F8_E4M3, BF16, F16 or F32")
    elif scale is not None:
        found.append(f"{scale_name} stands beside {name}, which is {weight.dtype} and needs none")
    if found:
        return None, found
    decode: Callable[[Sequence[np.ndarray]], Tensor] = partial(
        _plain, stored=PLAIN.get(weight.dtype, torch.float32), dtype=dtype
    )
    entries = [weight]
    if scale is not None:
        entries.append(scale)
        decode = partial(_fp8, dtype=dtype)
    try:
        parts = tuple(
            MappedRows(e.path, offset=e.offset, rows=rows, row_bytes=e.shape[1] * WIDTHS[e.dtype])
            for e in entries
        )
    except (ValueError, OSError) as error:
        return None, [str(error)]
    return Table(name, parts, decode), []


def _fp8(parts: Sequence[np.ndarray], *, dtype: torch.dtype) -> Tensor:
    codes, scales = (torch.from_numpy(part) for part in parts)
    return decode_fp8_rows(
        codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), dtype=dtype
    )


def _plain(parts: Sequence[np.ndarray], *, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(parts[0]).view(stored).to(dtype)


def _shape_problems(name: str, entry: Entry, wanted: tuple[int, int]) -> list[str]:
    if entry.shape == wanted:
        return []
    return [f"{name} is {_times(entry.shape)}, not {_times(wanted)} as this model needs"]


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)


def _index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of safetensors files ({error!r})") from None


def _read_header(path: Path) -> dict[str, Entry]:
    """The header of a safetensors file: 8 bytes of length, then JSON."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= size - 8:
            raise ValueError(f"{path} is no safetensors file, or it is cut short")
        text = file.read(length)
    try:
        header = json.loads(text)
        entries = {
            name: Entry(path, e["dtype"], tuple(e["shape"]), 8 + length + e["data_offsets"][0])
            for name, e in header.items()
            if name != "__metadata__"
        }
        ends = {name: e["data_offsets"] for name, e in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no safetensors file ({error!r})") from None
    for name, entry in entries.items():
        start, end = ends[name]
        if entry.dtype in WIDTHS and end - start != math.prod(entry.shape) * WIDTHS[entry.dtype]:
            raise ValueError(
                f"{path}: the header gives {name} {end - start:,} bytes: it is damaged"
            )
    return entries
