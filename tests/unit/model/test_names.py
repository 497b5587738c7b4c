"""Released tensor names: the reference cases' files, both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.names import released_gradients, released_slots, table_name
from model.released.load import load_folder, tables_of, targets_of
from model.transformer import DeepseekV41

CASES = ["tiny_text", "tiny_text_noqat", "tiny_packed", "tiny_image"]


def built(golden: Path, case: str) -> tuple[DeepseekV41, OwnerStore, dict[str, Tensor]]:
    config = ModelConfig.from_released(json.loads((golden / case / "config.json").read_text()))
    tensors = load_file(golden / case / "model.safetensors")
    return DeepseekV41(config), OwnerStore(config, seed=0), tensors


def load(model: DeepseekV41, store: OwnerStore, folder: Path) -> None:
    load_folder(folder, [*targets_of(model), *tables_of(store)], unread=lambda name: False)


def written(model: DeepseekV41, store: OwnerStore) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for released, part in released_slots(name, tensor.detach()):
            assert released not in out
            out[released] = part
    for layer, weight in zip(store.layers, store.weight, strict=True):
        out[table_name(layer)] = weight
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_released_name_comes_out_and_every_value_returns(
    golden_folder: Path, case: str
) -> None:
    model, store, tensors = built(golden_folder, case)
    load(model, store, golden_folder / case)
    found = written(model, store)
    assert sorted(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_gate_and_up_rows_go_to_their_own_names(golden_folder: Path) -> None:
    model, store, tensors = built(golden_folder, "tiny_text")
    load(model, store, golden_folder / "tiny_text")
    own = dict(model.named_parameters())
    stacked = own["layers.2.ffn.experts.w13"]
    assert torch.equal(stacked[5, :32], tensors["layers.2.ffn.experts.5.w1.weight"])
    assert torch.equal(stacked[5, 32:], tensors["layers.2.ffn.experts.5.w3.weight"])
    shared = own["layers.2.ffn.shared_experts.w13.weight"]
    assert torch.equal(shared[32:], tensors["layers.2.ffn.shared_experts.w3.weight"])
    assert torch.equal(own["layers.4.hc_ffn.base"], tensors["layers.4.hc_ffn_base"])


def test_gradients_come_out_under_the_same_names(
    golden_folder: Path, make_config: Callable, make_rig: Callable
) -> None:
    _, _, tensors = built(golden_folder, "tiny_text")
    rig = make_rig(make_config())
    packed = rig.pack([[list(range(3, 20))]])
    window = rig.store.open_window([packed.rows])
    loss = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels).loss_sum
    loss.backward()
    found = released_gradients(rig.model, rig.store, window)
    without = {n for n in tensors if ".indexer." in n or n.endswith(("gate.bias", "gate.bias_vl"))}
    assert set(found) == set(tensors) - without
    for name, gradient in found.items():
        assert gradient.shape == tensors[name].shape
    table = found[table_name(3)]
    untouched = torch.ones(552, dtype=torch.bool)
    untouched[window.ids[1]] = False
    assert untouched.any() and not table[untouched].any()
    assert torch.equal(table[window.ids[1]], window.grads[1]) and window.grads[1].any()
