import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from model.config import ModelConfig
from model.transformer import DeepseekV41
from tests.builders import optim_config
from trainer.optim import (
    build_adamw,
    group_of,
    named_parameters,
    optimizer_tensors,
    set_learning_rate,
)

OPTIM = optim_config()
CONFIG = ModelConfig.from_released(
    json.loads((Path(__file__).parents[2] / "golden/tiny_image/config.json").read_text())
)

# Every kind of parameter that a model can have, layer numbers left out.
EXPECTED = {
    "embed.weight": "no_decay",
    "head.weight": "no_decay",
    "norm.weight": "decay",
    "layers.attn_norm.weight": "decay",
    "layers.ffn_norm.weight": "decay",
    "layers.attn.wq_a.weight": "decay",
    "layers.attn.wq_b.weight": "decay",
    "layers.attn.wkv.weight": "decay",
    "layers.attn.wo_a.weight": "decay",
    "layers.attn.wo_b.weight": "decay",
    "layers.attn.q_norm.weight": "decay",
    "layers.attn.kv_norm.weight": "decay",
    "layers.attn.attn_sink": "no_decay",
    "layers.attn.compressor.wkv.weight": "decay",
    "layers.attn.compressor.wgate.weight": "decay",
    "layers.attn.compressor.norm.weight": "decay",
    "layers.attn.indexer.wq_b.weight": "not trained",
    "layers.attn.indexer.weights_proj.weight": "not trained",
    "layers.attn.indexer.wk.weight": "not trained",
    "layers.attn.indexer.k_norm.weight": "not trained",
    "layers.ffn.gate.weight": "decay",
    "layers.ffn.experts.w13": "decay",
    "layers.ffn.experts.w2": "decay",
    "layers.ffn.shared_experts.w13.weight": "decay",
    "layers.ffn.shared_experts.w2.weight": "decay",
    "layers.hc_attn.fn": "decay",
    "layers.hc_attn.base": "no_decay",
    "layers.hc_attn.scale": "no_decay",
    "layers.hc_ffn.fn": "decay",
    "layers.hc_ffn.base": "no_decay",
    "layers.hc_ffn.scale": "no_decay",
    "layers.engram.wkv.weight": "decay",
    "layers.engram.q_weight": "no_decay",
    "layers.engram.k_weight": "no_decay",
    "vision.patch_embed.proj.weight": "decay",
    "vision.patch_embed.proj.bias": "no_decay",
    "vision.blocks.norm1.weight": "decay",
    "vision.blocks.norm2.weight": "decay",
    "vision.blocks.attn.wqkv.weight": "decay",
    "vision.blocks.attn.wqkv.bias": "no_decay",
    "vision.blocks.attn.wo.weight": "decay",
    "vision.blocks.attn.wo.bias": "no_decay",
    "vision.blocks.mlp.w1.weight": "decay",
    "vision.blocks.mlp.w2.weight": "decay",
    "vision.norm.weight": "decay",
    "aligner.w1.weight": "decay",
    "aligner.w1.bias": "no_decay",
    "aligner.w2.weight": "decay",
    "aligner.w2.bias": "no_decay",
    "image_start": "no_decay",
    "image_newline": "no_decay",
    "image_end": "no_decay",
}


def kind(name):
    return ".".join(part for part in name.split(".") if not part.isdigit())


def test_every_parameter_of_the_model_is_in_the_group_it_should_be_in():
    model = DeepseekV41(CONFIG)
    optimizer = build_adamw(model, OPTIM)
    found = {kind(name): "not trained" for name, _ in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["weight_decay"] == (0.1 if group["name"] == "decay" else 0.0)
        found |= {kind(name): group["name"] for name in group["param_names"]}
    assert found == EXPECTED


def test_a_parameter_is_in_exactly_one_group():
    model = DeepseekV41(CONFIG)
    names = [name for name, _ in named_parameters(build_adamw(model, OPTIM))]
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(names) == sorted(trained)


def test_a_vector_of_an_unknown_kind_must_be_decided_on():
    with pytest.raises(ValueError, match=r"vision\.gamma .*groups in trainer/optim\.py"):
        group_of("vision.gamma", torch.zeros(3))


@pytest.mark.parametrize(
    "name", ["vision.blocks.0.attn.wqkv.bias", "aligner.w1.bias", "layers.0.ffn.gate.bias_vl"]
)
def test_biases_do_not_decay(name):
    assert group_of(name, torch.zeros(3)) == "no_decay"


def test_one_step_is_decoupled_adamw():
    model = nn.ModuleDict({"norm": nn.Linear(3, 2, bias=True)})
    weight, bias = model.get_parameter("norm.weight"), model.get_parameter("norm.bias")
    before = [weight.detach().clone(), bias.detach().clone()]
    optimizer = build_adamw(model, OPTIM)
    set_learning_rate(optimizer, 0.5)
    gradients = [torch.tensor([[1.0, -2.0, 0.0], [3.0, 0.5, -0.1]]), torch.tensor([4.0, -5.0])]
    weight.grad, bias.grad = gradients
    optimizer.step()
    # After bias correction the first update is the gradient's sign (0 stays 0).
    signs = [g / (g.abs() + 1e-8) for g in gradients]
    assert torch.allclose(weight, before[0] * (1 - 0.5 * 0.1) - 0.5 * signs[0], atol=1e-6)
    assert torch.allclose(bias, before[1] - 0.5 * signs[1], atol=1e-6)


def run_steps(threads):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(257, 131), "norm": nn.Linear(1000, 7)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = build_adamw(model, OPTIM)
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return list(model.parameters())


def test_the_step_is_bit_repeatable_for_any_number_of_threads():
    threads = torch.get_num_threads()
    try:
        runs = [run_steps(n) for n in (1, 1, 2)]
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_state_copied_by_name_continues_bit_for_bit():
    def gradient(parameter, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(parameter.shape, generator=generator)

    def steps(model, optimizer, numbers):
        for step in numbers:
            for parameter in model.parameters():
                parameter.grad = gradient(parameter, step)
            optimizer.step()

    through = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    stopped = copy.deepcopy(through)
    optimizer = build_adamw(through, OPTIM)
    steps(through, optimizer, range(6))

    first = build_adamw(stopped, OPTIM)
    steps(stopped, first, range(3))
    second = build_adamw(stopped, OPTIM)
    saved, fresh = optimizer_tensors(first), optimizer_tensors(second)
    assert saved.keys() == fresh.keys()
    assert "0.weight/exp_avg_sq" in saved
    for name, tensor in fresh.items():
        tensor.copy_(saved[name])
    steps(stopped, second, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(through.parameters(), stopped.parameters(), strict=True)
    )
