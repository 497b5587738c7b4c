"""Cases of other shapes than the reference ones: written from our own numbers, then judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launcher.verify.case import open_case
from launcher.verify.model_run import run
from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.init import init_weights
from model.names import released_slots
from model.transformer import DeepseekV41

SHAPES = {
    "ratio 4, no candidates": {
        "compress_ratios": [0, 4, 4, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "candidate_source_layer_id": None,
    },
    "ratios 2 and 3": {
        "compress_ratios": [0, 2, 3, 3],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
    },
    "window only": {
        "compress_ratios": [0, 0, 0, 0],
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
    },
}


def write_case(folder: Path, source: Path, shape: dict) -> None:
    """A packed case without Engram; its outputs are what we compute."""
    document = json.loads((source / "config.json").read_text())
    document["text_config"] |= {
        **shape,
        "num_hidden_layers": 4,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    config = ModelConfig.from_released(document)
    model = DeepseekV41(config)
    init_weights(model, seed=3, std=0.2)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = {n: t.detach().clone() for name, own in tensors for n, t in released_slots(name, own)}
    ids = torch.randint(3, 400, (2, 29), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([[5, 9, 1, 13], [29, 0, 0, 0]])
    labels = ids.clone()
    labels[0, 28:] = -100
    assert OwnerStore(config, seed=0).weight == []
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "case.json").write_text(json.dumps({"kind": "model", "qat": False}))
    save_file(weights, folder / "model.safetensors")
    save_file(
        {"input_ids": ids, "labels": labels, "seq_lens": lengths}, folder / "inputs.safetensors"
    )
    found = run(open_case(folder))
    logits = torch.zeros(2, 29, config.vocab_size)
    at = found.documents
    logits[at.row, at.case_column] = found.logits[at.row, at.column]
    gradients = {f"grad.{name}": grad.clone() for name, grad in found.gradients.items()}
    outputs = {n: t.clone() for n, t in found.outputs.items()}
    save_file(
        {"logits": logits, "loss": found.loss, **outputs, **gradients},
        folder / "outputs.safetensors",
    )


@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_are_read(
    verify: Callable[..., tuple[int, list[str]]], golden: Path, tmp_path: Path, name: str
) -> None:
    write_case(tmp_path, golden / "tiny_packed", SHAPES[name])
    code, (line,) = verify(tmp_path)
    assert code == 0, line
    assert "logits 0.0e+00" in line
    sources = SHAPES[name]["index_source_layer_ids"]
    assert ("selections" in line) == bool(sources)
