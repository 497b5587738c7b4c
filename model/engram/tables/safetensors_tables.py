"""Engram tables in a folder of safetensors: the released FP8 ones, and unquantised ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from model.engram.tables.file_rows import FileRows
from model.engram.tables.table import Table
from model.names import table_name
from model.quantization.released import decode_fp8_rows
from model.released.audit import audit
from model.released.files import DTYPES, Stored, WeightsFolder, open_folder
from model.released.layout import quantised_form, scale_of

if TYPE_CHECKING:
    from model.config import ModelConfig


def find_tables(path: Path, config: ModelConfig) -> tuple[list[Table], list[str]]:
    """The tables of config.engram_layers, or everything wrong with them.

    Files that hold no part of a table need not be there. ValueError when there are no weights.
    """
    folder = open_folder(path)
    names = [table_name(layer) for layer in config.engram_layers]
    shapes = [(rows, config.engram_head_dim) for rows in config.engram_num_embeddings]
    wanted = dict(zip(names, shapes, strict=False))
    found = audit(folder, wanted, unread=lambda name: True)
    parts = {*names, *(scale_of(name) for name in names)}
    if not folder.lost & parts and all(problem in folder.problems for problem in found):
        found = []  # what is wrong is wrong elsewhere
    found += _other_settings(folder, config)
    if found:
        return [], found
    return [_table(folder, name, dtype=getattr(torch, config.dtype)) for name in names], []


def _table(folder: WeightsFolder, name: str, *, dtype: torch.dtype) -> Table:
    weight = folder.tensors[name]
    if quantised_form(weight) is None:
        decode = partial(_plain, stored=DTYPES[weight.dtype], dtype=dtype)
        return Table(name, (_rows_of(folder, weight),), decode)
    scale = folder.tensors[scale_of(name)]
    parts = (_rows_of(folder, weight), _rows_of(folder, scale))
    return Table(name, parts, partial(_fp8, dtype=dtype))


def _rows_of(folder: WeightsFolder, stored: Stored) -> FileRows:
    return FileRows(
        folder.path / stored.file,
        offset=stored.start,
        rows=stored.rows,
        row_bytes=stored.size // stored.rows,
    )


def _fp8(parts: Sequence[np.ndarray], *, dtype: torch.dtype) -> Tensor:
    codes, scales = (torch.from_numpy(part) for part in parts)
    return decode_fp8_rows(
        codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), dtype=dtype
    )


def _plain(parts: Sequence[np.ndarray], *, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(parts[0]).view(stored).to(dtype)


def _other_settings(folder: WeightsFolder, config: ModelConfig) -> list[str]:
    """Engram settings of the config.json beside the tables that are not this model's.

    Tables of equal sizes may have been made with another hash.
    """
    theirs = (folder.json("config.json") or {}).get("text_config")
    if not isinstance(theirs, dict):
        return []
    ours = config.to_released()["text_config"]
    return [
        f"config.json has {key}={value}, this model {ours[key]}"
        for key, value in theirs.items()
        if key.startswith("engram_") and key in ours and value != ours[key]
    ]
