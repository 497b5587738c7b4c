"""Packed documents with images, and a plain computation of what a tower gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import ModelConfig, QatConfig
from model.engram.hashing import HashGeometry, hash_rows
from model.layout import Images
from model.transformer import DeepseekV41

GOLDEN = Path(__file__).parents[3] / "golden"
BASE = ModelConfig.from_released(json.loads((GOLDEN / "tiny_image" / "config.json").read_text()))
IMAGE_TOKEN, PAD_COMPRESSED = 3, 2


@pytest.fixture(scope="session")
def image_config() -> ModelConfig:
    """Two tower layers of width 32, patches of 4 pixels, 3 x 3 of them a token; quantisers off."""
    return replace(BASE, qat=QatConfig(False, False, False))


class Picture(NamedTuple):
    """An image of rows x cols patches; its seed makes its pixels."""

    rows: int
    cols: int
    seed: int

    def patches(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(self.rows * self.cols, 48, generator=generator) * 2 - 1

    def types(self) -> list[int]:
        rows, cols = -(-self.rows // 3), -(-self.cols // 3)
        return [0, *([*([1] * cols), 2] * rows), 3]


@pytest.fixture(scope="session")
def picture() -> type[Picture]:
    return Picture


@pytest.fixture(scope="session")
def pack_pictures() -> Callable:
    """pack(rig, rows), see `packed_pictures`."""
    return packed_pictures


def packed_pictures(rig, rows: list[list[list]], **options):
    """Like `rig.pack`, where a document may hold pictures among its tokens."""
    ids, types, pictures = [], [], []
    for documents in rows:
        ids.append([])
        types.append([])
        for document in documents:
            kinds: list[int] = []
            for part in document:
                if isinstance(part, Picture):
                    pictures.append(part)
                    kinds += part.types()
                else:
                    kinds.append(-1)
            tokens = [t for t in document if not isinstance(t, Picture)]
            text = iter(tokens)
            ids[-1].append([IMAGE_TOKEN if k >= 0 else next(text) for k in kinds])
            types[-1].append(kinds)
    packed = rig.pack(ids, **options)
    spans = packed.inputs.token_types.clone()
    flat = [kinds for documents in types for kinds in documents]
    for (row, column, length), kinds in zip(packed.places, flat, strict=True):
        spans[row, column : column + length] = torch.tensor(kinds, dtype=torch.int8)
    after = F.pad(spans, (0, 1), value=-1)[:, 1:]
    images = None
    if pictures:
        grids = torch.tensor([[p.rows, p.cols] for p in pictures])
        images = Images(torch.cat([p.patches() for p in pictures]), grids)
    compressed = packed.inputs.input_ids % rig.config.engram_compressed_vocab_size
    hashed = hash_rows(
        HashGeometry.from_config(rig.config),
        compressed.numpy(),
        seq_ids=packed.inputs.seq_ids.numpy(),
        live=(spans < 0).numpy(),
        pad_id=PAD_COMPRESSED,
    )
    return replace(
        packed,
        inputs=replace(packed.inputs, token_types=spans, images=images),
        labels=packed.labels.masked_fill(after >= 0, -100),
        rows=torch.from_numpy(hashed),
    )


@pytest.fixture(scope="session")
def plain_tower() -> Callable:
    """tower(model, patches, rows, cols) in float64: one image, token by token."""
    return _plain_tower


def _plain_tower(model: DeepseekV41, patches: Tensor, rows: int, cols: int) -> Tensor:
    w = {n: t.detach().double() for n, t in model.named_parameters()}
    v = model.config.vision
    heads, dh = v.num_attention_heads, v.hidden_size // v.num_attention_heads
    x = patches.double() @ w["vision.patch_embed.proj.weight"].T + w["vision.patch_embed.proj.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    def turned(vector: Tensor, row: int, col: int) -> Tensor:
        out = vector.clone()
        for i in range(dh // 2):
            place, j = (row, i) if i < dh // 4 else (col, i - dh // 4)
            angle = torch.tensor(place * v.rope_theta ** (-2 * j / (dh / 2)), dtype=torch.float64)
            a, b = vector[i], vector[i + dh // 2]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + dh // 2] = b * angle.cos() + a * angle.sin()
        return out

    for n in range(v.num_hidden_layers):
        name = f"vision.blocks.{n}."
        qkv = norm(x, name + "norm1.weight") @ w[name + "attn.wqkv.weight"].T
        q, k, value = (qkv + w[name + "attn.wqkv.bias"]).split(v.hidden_size, dim=-1)
        out = torch.zeros_like(x)
        for h in range(heads):
            part = slice(h * dh, (h + 1) * dh)
            qh = torch.stack([turned(q[t, part], t // cols, t % cols) for t in range(rows * cols)])
            kh = torch.stack([turned(k[t, part], t // cols, t % cols) for t in range(rows * cols)])
            out[:, part] = (qh @ kh.T / dh**0.5).softmax(-1) @ value[:, part]
        x = x + out @ w[name + "attn.wo.weight"].T + w[name + "attn.wo.bias"]
        gate, up = (norm(x, name + "norm2.weight") @ w[name + "mlp.w1.weight"].T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ w[name + "mlp.w2.weight"].T
    x = norm(x, "vision.norm.weight")

    d, tokens = v.downsample_ratio, []
    for top in range(0, rows, d):
        for left in range(0, cols, d):
            cell = torch.zeros(v.hidden_size, d, d, dtype=torch.float64)
            for y in range(top, min(top + d, rows)):
                for z in range(left, min(left + d, cols)):
                    cell[:, y - top, z - left] = x[y * cols + z]
            inner = w["aligner.w1.weight"] @ cell.flatten() + w["aligner.w1.bias"]
            inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))
            tokens.append(w["aligner.w2.weight"] @ inner + w["aligner.w2.bias"])
    return torch.stack(tokens)
