"""Engram tables in GGUF files, and the hash constants that such a file carries.

The format of the public conversions, whose `general.architecture` A (deepseek41) prefixes keys:

    A.engram.layer_ids, .head_count, .key_length, .max_ngram_size   the geometry
    A.engram.multipliers, .primes, .offsets    flat over layers, 64-bit
    A.engram.token_map                         token id -> compressed id
    A.engram.pad_id                            the pad token's compressed id
    blk.N.engram_embd.weight                   one row of key_length values per table row

A row of 256 values is one Q2_K super-block of 84 bytes; any other type that package gguf decodes is
read as well. A set split into X-00001-of-0000N.gguf has the keys in its first file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from model.engram.hashing import HashGeometry
from model.engram.tables.file_rows import FileRows
from model.engram.tables.table import Table

if TYPE_CHECKING:
    from gguf import GGUFReader

    from model.config import ModelConfig

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
HASH_KEYS = ("multipliers", "primes", "offsets", "token_map", "pad_id")
GEOMETRY_KEYS = ("layer_ids", "head_count", "key_length", "max_ngram_size")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: shape as GGUF orders it (row length first), GGML type, place."""

    path: Path
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """What we need of a GGUF file or split set: Engram keys without their prefix, tensors."""

    path: Path
    keys: dict[str, np.ndarray]
    tensors: dict[str, Entry]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """ValueError, naming the file, when one is missing or no GGUF file."""
        files = _split_set(path)
        keys: dict[str, np.ndarray] = {}
        tensors: dict[str, Entry] = {}
        for number, file in enumerate(files):
            found, entries = _read(file, with_keys=number == 0)
            keys |= found
            tensors |= entries
        return cls(files[0], keys, tensors)


def find_tables(
    path: Path, config: ModelConfig, token_map: np.ndarray | None
) -> tuple[list[Table], list[str]]:
    """The tables of config.engram_layers, or everything wrong with them and their hash.

    ValueError when a file is missing or is no GGUF file.
    """
    file = GgufFile.open(path)
    found = hash_problems(file, config, token_map)
    tables = []
    for layer, rows in zip(config.engram_layers, config.engram_num_embeddings, strict=False):
        table, problems = _find_table(
            file,
            layer,
            shape=(rows, config.engram_head_dim),
            dtype=getattr(torch, config.dtype),
        )
        found += problems
        if table is not None:
            tables.append(table)
    return tables, found


def hash_problems(file: GgufFile, config: ModelConfig, token_map: np.ndarray | None) -> list[str]:
    """Where the file's geometry or hash constants differ from this model's; empty when they agree.

    token_map: of the run's tokenizer; None leaves token map and pad id uncompared. A file that
    lacks one of the keys is refused too: rows hashed otherwise would be read in silence.
    """
    missing = [key for key in GEOMETRY_KEYS + HASH_KEYS if key not in file.keys]
    if missing:
        return [
            f"{file.path} lacks the metadata {', '.join(f'*.engram.{k}' for k in missing)}; "
            "without them its rows cannot be told from another hash's: convert the model anew"
        ]
    geometry = HashGeometry.from_config(config)
    layers = [int(n) for n in file.keys["layer_ids"]]
    kept = len(geometry.layer_ids)
    wanted: dict[str, np.ndarray] = {
        "layer_ids": np.array(geometry.layer_ids),
        "head_count": np.array([config.engram_n_heads]),
        "key_length": np.array([config.engram_head_dim]),
        "max_ngram_size": np.array([config.engram_max_ngram_size]),
        "multipliers": geometry.multipliers.ravel(),
        "primes": geometry.primes.ravel(),
        "offsets": geometry.offsets.ravel(),
    }
    if token_map is not None:
        wanted["token_map"] = token_map
        wanted["pad_id"] = token_map[[config.engram_pad_token_id]]
    found = []
    for key, ours in wanted.items():
        theirs = file.keys[key]
        # A model with fewer layers than the file reads the first tables.
        if key in ("multipliers", "primes", "offsets", "layer_ids") and len(layers) > kept:
            theirs = theirs[: len(theirs) // len(layers) * kept]
        if difference := _difference(key, theirs, ours):
            found.append(f"{file.path}: {difference}")
    return found


def _find_table(
    file: GgufFile, layer: int, *, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[Table | None, list[str]]:
    """Layer `layer`'s table of this shape, decoded to `dtype`, or what is wrong with it."""
    rows, dim = shape
    name = f"blk.{layer}.engram_embd.weight"
    entry = file.tensors.get(name)
    if entry is None:
        return None, [f"{file.path} does not hold {name}"]
    if entry.shape != (dim, rows):
        return None, [f"{name} has shape {list(reversed(entry.shape))}, not {list(shape)}"]
    try:
        part = FileRows(entry.path, offset=entry.offset, rows=rows, row_bytes=entry.nbytes // rows)
        table = Table(name, (part,), partial(_dequantised, kind=entry.kind, dtype=dtype))
        table.read(np.zeros(1, dtype=np.int64))
    except (ValueError, OSError) as error:
        return None, [str(error)]
    except NotImplementedError:
        return None, [f"{name} is stored as {entry.kind.name}, which package gguf cannot decode"]
    return table, []


def _dequantised(parts: Sequence[np.ndarray], *, kind: Any, dtype: torch.dtype) -> Tensor:
    from gguf.quants import dequantize

    return torch.from_numpy(np.ascontiguousarray(dequantize(parts[0], kind))).to(dtype)


def _difference(key: str, theirs: np.ndarray, ours: np.ndarray) -> str:
    if len(theirs) != len(ours):
        return f"engram.{key} has {len(theirs):,} entries, this model {len(ours):,}"
    different = np.flatnonzero(theirs.astype(np.int64) != ours)
    if not len(different):
        return ""
    at = int(different[0])
    place = f"[{at}]" if len(ours) > 1 else ""
    return (
        f"engram.{key}{place} is {int(theirs[at])}, this model's {int(ours[at])}: "
        "the table was made for another tokenizer or geometry"
    )


def _split_set(path: Path) -> list[Path]:
    """The files of the set that `path` belongs to, the first first."""
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    stem, count = split[1], int(split[3])
    files = [path.with_name(f"{stem}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path.parent} lacks {', '.join(missing)} of the split {path.name}")
    return files


def _read(path: Path, *, with_keys: bool) -> tuple[dict[str, np.ndarray], dict[str, Entry]]:
    reader_type = quick_reader()
    try:
        reader = reader_type(path)
        keys = _engram_keys(reader.fields) if with_keys else {}
    except (ValueError, KeyError, IndexError, OSError, struct.error) as error:
        raise ValueError(
            f"{path} cannot be read as GGUF ({error}); it may be cut short: fetch it again"
        ) from None
    tensors = {
        t.name: Entry(
            path, tuple(int(n) for n in t.shape), t.tensor_type, t.data_offset, int(t.n_bytes)
        )
        for t in reader.tensors
    }
    return keys, tensors


def quick_reader() -> type[GGUFReader]:
    """The package's reader, which reads an array at once where its own makes objects of each entry.

    A file with a tokenizer has half a million: 15 s and 0.5 GB, which become 0.2 s.
    """
    from gguf import GGUFReader, GGUFValueType

    class Quick(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int):  # type: ignore[override]
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            scalar = self.gguf_scalar_to_np.get(GGUFValueType(kind[0]))
            start = orig_offs + 12
            if scalar is not None:
                entries = self._get(start, scalar, int(count[0]))
            elif kind[0] == GGUFValueType.STRING:
                end, raw = start, self.data.data
                for _ in range(int(count[0])):
                    end += 8 + struct.unpack_from("<Q", raw, end)[0]
                entries = self._get(start, np.uint8, end - start)
            else:
                return super()._get_field_parts(orig_offs, raw_type)
            types = [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
            return 12 + int(entries.nbytes), [kind, count, entries], [2], types

    return Quick


def _engram_keys(fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The Engram entries, copied out of the file."""
    architecture = fields.get("general.architecture")
    prefix = f"{architecture.contents()}.engram." if architecture is not None else ".engram."
    return {
        name.removeprefix(prefix): np.concatenate([field.parts[i] for i in field.data])
        for name, field in fields.items()
        if name.startswith(prefix) and name.removeprefix(prefix) in GEOMETRY_KEYS + HASH_KEYS
    }
