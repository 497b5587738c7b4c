"""Table files of the small model: safetensors in every stored form, and GGUF."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import EngramStoreConfig, ModelConfig
from model.engram.hashing import HashGeometry
from model.names import table_name

FP8 = torch.float8_e4m3fn
SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    FP8: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """By hand, so that the reader is tested against the format and not against a library."""
    header, at, body = {}, 0, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + len(data)],
        }
        at, body = at + len(data), body + data
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def table_tensors(config: ModelConfig, form: str, seed: int = 0) -> dict[str, Tensor]:
    """Random tables of `config`: form fp8 (with scales), bfloat16 or float32."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        name, dim = table_name(layer), config.engram_head_dim
        if form == "fp8":
            codes = torch.randint(0, 255, (rows, dim), generator=generator).to(torch.uint8)
            codes[(codes & 127) == 127] = 0  # the two NaN codes
            scale = torch.randint(117, 137, (rows, -(-dim // 32)), generator=generator)
            out[name] = codes.view(FP8)
            out[name.replace(".weight", ".scale")] = scale.to(torch.uint8).view(
                torch.float8_e8m0fnu
            )
        else:
            values = torch.randn(rows, dim, generator=generator)
            out[name] = values.to(getattr(torch, form))
    return out


def exact(tensors: dict[str, Tensor], layer: int) -> Tensor:
    """A whole table in float64, by the definition of its form."""
    weight = tensors[table_name(layer)]
    if weight.dtype != FP8:
        return weight.double()
    scale = tensors[table_name(layer).replace(".weight", ".scale")].view(torch.uint8).double()
    return weight.double() * (2.0 ** (scale - 127)).repeat_interleave(32, 1)[:, : weight.shape[1]]


@dataclass(frozen=True)
class Files:
    """Tables on disk, and the model that is to read them."""

    config: ModelConfig
    path: Path
    tensors: dict[str, Tensor]

    def values(self, layer: int) -> Tensor:
        """A whole table in float64, by the definition of its form."""
        return exact(self.tensors, layer)

    def read_by(self, **changes) -> ModelConfig:
        """The model with its tables in these files, changed so."""
        store = EngramStoreConfig("mapped", str(self.path))
        return replace(self.config, **{"engram": store, **changes})


@pytest.fixture
def write_tables(tmp_path: Path, make_config: Callable[..., ModelConfig]) -> Callable[..., Files]:
    """write_tables(form="fp8", change=..., **config): model.safetensors of both tables.

    change(tensors) may alter what is written.
    """

    def write(
        form: str = "fp8",
        *,
        change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
        **settings,
    ) -> Files:
        config = make_config(**settings)
        tensors = table_tensors(config, form)
        change(tensors)
        write_safetensors(tmp_path / "model.safetensors", tensors)
        return Files(config, tmp_path, tensors)

    return write


@pytest.fixture(scope="session")
def write_file() -> Callable[[Path, dict[str, Tensor]], None]:
    """write_file(path, tensors): one safetensors file."""
    return write_safetensors


def super_blocks(rows: int, seed: int) -> np.ndarray:
    """Random Q2_K super-blocks, one a row: 16 scales, 64 quants, two halves: uint8 [rows, 84]."""
    dice = np.random.default_rng(seed)
    halves = dice.uniform(0.01, 2, (rows, 2)).astype(np.float16).view(np.uint8)
    return np.concatenate([dice.integers(0, 256, (rows, 80), dtype=np.uint8), halves], axis=1)


@pytest.fixture
def write_gguf(
    tmp_path: Path, make_config: Callable[..., ModelConfig], token_map: np.ndarray
) -> Callable[..., Files]:
    """write_gguf(kind="Q2_K", keys=..., **config): tables.gguf with its hash constants.

    keys(entries) may alter the Engram entries before they are written. `tensors` of the result
    holds the raw rows by layer.
    """

    def write(
        kind: str = "Q2_K",
        *,
        keys: Callable[[dict[str, Any]], object] = lambda entries: None,
        name: str = "tables.gguf",
        **settings,
    ) -> Files:
        import gguf

        config = make_config(**{"engram_head_dim": 256, **settings})
        geometry = HashGeometry.from_config(config)
        entries: dict[str, Any] = {
            "layer_ids": list(config.engram_layer_ids),
            "head_count": config.engram_n_heads,
            "key_length": config.engram_head_dim,
            "max_ngram_size": config.engram_max_ngram_size,
            "multipliers": geometry.multipliers.ravel().tolist(),
            "primes": geometry.primes.ravel().tolist(),
            "offsets": geometry.offsets.ravel().tolist(),
            "token_map": token_map.tolist(),
            "pad_id": int(token_map[config.engram_pad_token_id]),
        }
        keys(entries)
        writer = gguf.GGUFWriter(tmp_path / name, "deepseek41")
        for key, value in entries.items():
            listed = isinstance(value, list)
            wide = key in ("multipliers", "primes", "offsets")
            kind_of = gguf.GGUFValueType.UINT64 if wide else gguf.GGUFValueType.INT32
            if listed:
                writer.add_key_value(
                    f"deepseek41.engram.{key}", value, gguf.GGUFValueType.ARRAY, kind_of
                )
            else:
                writer.add_key_value(f"deepseek41.engram.{key}", value, kind_of)
        raw = {}
        sizes = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        for layer, rows in sizes:
            if kind == "Q2_K":
                data = super_blocks(rows, layer)
            else:
                values = np.random.default_rng(layer).normal(size=(rows, config.engram_head_dim))
                data = gguf.quants.quantize(
                    values.astype(np.float32), gguf.GGMLQuantizationType[kind]
                )
            raw[f"blk.{layer}.engram_embd.weight"] = torch.from_numpy(data)
            writer.add_tensor(
                f"blk.{layer}.engram_embd.weight",
                data,
                raw_dtype=gguf.GGMLQuantizationType[kind],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Files(config, tmp_path / name, raw)

    return write


@pytest.fixture(scope="session")
def token_map() -> np.ndarray:
    """Compressed ids of a tokenizer of 400 entries."""
    return (np.arange(400) * 7 % 323).astype(np.int32)
