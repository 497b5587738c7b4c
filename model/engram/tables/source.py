"""From a configured path to the tables of every Engram layer, or all that is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from model.engram.tables import gguf_tables, safetensors_tables
from model.engram.tables.table import Table, sampled_rows

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
            tables, found = gguf_tables.find_tables(path, config, token_map)
        else:
            tables, found = safetensors_tables.find_tables(path, config)
        if not found:
            found = [problem for table in tables for problem in _samples(table)]
    except (ValueError, OSError) as error:
        tables, found = [], getattr(error, "problems", [str(error)])
    return tables, [f"model.engram.path={path}: {problem}" for problem in found]


def _samples(table: Table) -> list[str]:
    """A table that was never filled (a download that broke off) reads as zeros."""
    try:
        if table.read(sampled_rows(table.rows)).any():
            return []
    except ValueError as error:
        return [str(error)]
    return [f"{table.name} holds only zeros in {table.parts[0].path}: the file was never filled"]
