"""From a configured path to the tables of every Engram layer, or all that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from model.engram.tables import gguf_tables, safetensors_tables
from model.engram.tables.table import Table, sampled_rows
from model.names import table_name

if TYPE_CHECKING:
    from model.config import ModelConfig


def table_problems(config: ModelConfig, *, token_map: np.ndarray | None) -> list[str]:
    """Everything that keeps `config.engram.path` from serving this model; see `open_tables`."""
    return _find(config, token_map)[1]


def open_tables(config: ModelConfig, *, token_map: np.ndarray | None) -> list[Table]:
    """The tables of config.engram_layers, in layer order, out of config.engram.path.

    token_map: of the run's tokenizer, compared with the one that a GGUF file carries; None skips
    that. A ValueError lists every fault: a missing file or table, another row count or width,
    other hash constants, rows that are no numbers.
    """
    tables, found = _find(config, token_map)
    if found:
        raise ValueError("\n".join(found))
    return tables


def _find(config: ModelConfig, token_map: np.ndarray | None) -> tuple[list[Table], list[str]]:
    path = Path(config.engram.path)
    try:
        if not path.exists():
            raise ValueError("there is no such file or folder")
        if path.suffix == ".gguf":
            tables, found = _in_gguf(path, config, token_map)
        else:
            tables, found = _in_safetensors(path, config)
        if not found:
            found = [problem for table in tables for problem in _samples(table)]
    except (ValueError, OSError) as error:
        tables, found = [], [str(error)]
    return tables, [f"model.engram.path={path}: {problem}" for problem in found]


def _in_safetensors(path: Path, config: ModelConfig) -> tuple[list[Table], list[str]]:
    files = safetensors_tables.TensorFiles(path)
    found = _config_differences(path / "config.json", config) if path.is_dir() else []
    tables = []
    for layer, rows in zip(config.engram_layers, config.engram_num_embeddings, strict=False):
        table, problems = safetensors_tables.find_table(
            files, table_name(layer), rows=rows, dim=config.engram_head_dim, dtype=_dtype(config)
        )
        found += problems
        if table is not None:
            tables.append(table)
    return tables, found


def _in_gguf(
    path: Path, config: ModelConfig, token_map: np.ndarray | None
) -> tuple[list[Table], list[str]]:
    file = gguf_tables.GgufFile.open(path)
    found = gguf_tables.hash_problems(file, config, token_map)
    tables = []
    for layer, rows in zip(config.engram_layers, config.engram_num_embeddings, strict=False):
        table, problems = gguf_tables.find_table(
            file, layer, rows=rows, dim=config.engram_head_dim, dtype=_dtype(config)
        )
        found += problems
        if table is not None:
            tables.append(table)
    return tables, found


def _config_differences(path: Path, config: ModelConfig) -> list[str]:
    """Engram settings of the config.json beside the tables that are not this model's."""
    if not path.is_file():
        return []
    try:
        text = json.loads(path.read_text(encoding="utf-8")).get("text_config", {})
        theirs = {k: v for k, v in text.items() if k.startswith("engram_")}
    except (ValueError, AttributeError) as error:
        return [f"{path} cannot be read ({error})"]
    ours = config.to_released()["text_config"]
    return [
        f"{path} has {key}={value}, this model {ours[key]}"
        for key, value in theirs.items()
        if key in ours and value != ours[key]
    ]


def _samples(table: Table) -> list[str]:
    """A table that was never filled (a download that broke off) reads as zeros."""
    try:
        if table.read(sampled_rows(table.rows)).any():
            return []
    except ValueError as error:
        return [str(error)]
    return [f"{table.name} holds only zeros in {table.parts[0].path}: the file was never filled"]


def _dtype(config: ModelConfig) -> torch.dtype:
    return getattr(torch, config.dtype)
