"""Every parameter of the released model, and the rule by which the published recipe moves it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from launcher.schema import Report, build
from model.config import ModelConfig
from model.transformer import DeepseekV41
from trainer.config import OptimConfig
from trainer.optim import build_optimizer
from trainer.recipe import row_blocks

CONF = Path(__file__).parents[3] / "conf"

# Pattern, N for a layer's number: (how many, group, rows of the matrices in it for Muon).
EXPECTED: dict[str, tuple[int, str, dict[int, int]]] = {
    "embed.weight": (1, "sinkhorn", {}),
    "head.weight": (1, "sinkhorn", {}),
    "norm.weight": (1, "decay", {}),
    "layers.N.hc_attn.fn": (40, "muon", {24: 1}),
    "layers.N.hc_attn.base": (40, "no_decay", {}),
    "layers.N.hc_attn.scale": (40, "no_decay", {}),
    "layers.N.hc_ffn.fn": (40, "muon", {24: 1}),
    "layers.N.hc_ffn.base": (40, "no_decay", {}),
    "layers.N.hc_ffn.scale": (40, "no_decay", {}),
    "layers.N.attn_norm.weight": (40, "decay", {}),
    "layers.N.ffn_norm.weight": (40, "decay", {}),
    "layers.N.attn.attn_sink": (40, "no_decay", {}),
    "layers.N.attn.wq_a.weight": (40, "muon", {1280: 1}),
    "layers.N.attn.q_norm.weight": (40, "decay", {}),
    "layers.N.attn.wq_b.weight": (40, "muon", {512: 64}),
    "layers.N.attn.wkv.weight": (40, "muon", {512: 1}),
    "layers.N.attn.kv_norm.weight": (40, "decay", {}),
    "layers.N.attn.wo_a.weight": (40, "muon", {1024: 8}),
    "layers.N.attn.wo_b.weight": (40, "muon", {5120: 1}),
    "layers.N.attn.compressor.wkv.weight": (4, "muon", {512: 1}),
    "layers.N.attn.compressor.wgate.weight": (3, "muon", {512: 1}),
    "layers.N.attn.compressor.norm.weight": (4, "decay", {}),
    "layers.N.attn.indexer.wq_b.weight": (8, "muon", {128: 32}),
    "layers.N.attn.indexer.weights_proj.weight": (8, "muon", {32: 1}),
    "layers.N.attn.indexer.wk.weight": (4, "muon", {128: 1}),
    "layers.N.attn.indexer.k_norm.weight": (4, "decay", {}),
    "layers.N.ffn.gate.weight": (40, "muon", {384: 1}),
    "layers.N.ffn.experts.w13": (40, "muon", {2304: 2}),
    "layers.N.ffn.experts.w2": (40, "muon", {5120: 1}),
    "layers.N.ffn.shared_experts.w13.weight": (40, "muon", {2304: 2}),
    "layers.N.ffn.shared_experts.w2.weight": (40, "muon", {5120: 1}),
    "layers.N.engram.wkv.weight": (2, "muon", {25600: 1}),
    "layers.N.engram.q_weight": (2, "no_decay", {}),
    "layers.N.engram.k_weight": (2, "no_decay", {}),
    "vision.patch_embed.proj.weight": (1, "muon", {1024: 1}),
    "vision.patch_embed.proj.bias": (1, "no_decay", {}),
    "vision.blocks.N.norm1.weight": (32, "decay", {}),
    "vision.blocks.N.norm2.weight": (32, "decay", {}),
    "vision.blocks.N.attn.wqkv.weight": (32, "muon", {64: 32, 1024: 1}),
    "vision.blocks.N.attn.wqkv.bias": (32, "no_decay", {}),
    "vision.blocks.N.attn.wo.weight": (32, "muon", {1024: 1}),
    "vision.blocks.N.attn.wo.bias": (32, "no_decay", {}),
    "vision.blocks.N.mlp.w1.weight": (32, "muon", {5632: 1}),
    "vision.blocks.N.mlp.w2.weight": (32, "muon", {1024: 1}),
    "vision.norm.weight": (1, "decay", {}),
    "aligner.w1.weight": (1, "muon", {5120: 1}),
    "aligner.w1.bias": (1, "no_decay", {}),
    "aligner.w2.weight": (1, "muon", {5120: 1}),
    "aligner.w2.bias": (1, "no_decay", {}),
    "image_start": (1, "no_decay", {}),
    "image_newline": (1, "no_decay", {}),
    "image_end": (1, "no_decay", {}),
}


def composed(path: str, kind: type):
    report = Report()
    found = build(kind, OmegaConf.to_container(OmegaConf.load(CONF / path)), report=report)
    assert not report
    return found


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    return composed("model/flash.yaml", ModelConfig)


@pytest.fixture(scope="module")
def model(flash: ModelConfig) -> DeepseekV41:
    with torch.device("meta"):
        return DeepseekV41(flash, distill=True)


def pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def test_every_parameter_has_one_group(model: DeepseekV41, flash: ModelConfig) -> None:
    optimizer = build_optimizer(model, composed("optim/pretrain.yaml", OptimConfig), flash)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(shapes)
    found: dict[str, tuple[int, str, dict[int, int]]] = {}
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            blocks: dict[int, int] = {}
            if group["name"] == "muon":
                parts = row_blocks(name, model.get_parameter(name), flash)
                assert sum(parts) == shapes[name][-2]
                blocks = dict(Counter(parts))
            count, _, _ = found.get(pattern(name), (0, "", {}))
            found[pattern(name)] = count + 1, group["name"], blocks
    assert found == EXPECTED
    assert sum(count for count, _, _ in found.values()) == 1150


def test_only_norms_and_matrices_decay(model: DeepseekV41, flash: ModelConfig) -> None:
    optimizer = build_optimizer(model, composed("optim/pretrain.yaml", OptimConfig), flash)
    decays = {group["name"]: group.get("weight_decay") for group in optimizer.param_groups}
    assert decays == {"decay": 0.1, "no_decay": 0.0, "muon": None, "sinkhorn": None}
