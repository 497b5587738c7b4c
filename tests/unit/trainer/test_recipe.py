"""The published recipe: a rule for every parameter, and a run that learns and resumes by it."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.config import ModelConfig
from model.transformer import DeepseekV41
from trainer.config import OptimConfig
from trainer.optim import ParameterOptimizer, build_optimizer, optimizer_tensors
from trainer.recipe import row_blocks, rule_of

CONFIG = ModelConfig.from_released(
    json.loads((Path(__file__).parents[2] / "golden/tiny_image/config.json").read_text())
)
SINKHORN = {"embed.weight", "head.weight"}
ADAMW = re.compile(
    r"norm\d?\.weight$|bias$|attn_sink$|hc_(attn|ffn)\.(base|scale)$"
    r"|engram\.[qk]_weight$|^image_(start|newline|end)$"
)


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    with torch.device("meta"):
        return DeepseekV41(CONFIG, distill=True)


def test_every_parameter_has_its_rule(model):
    found = {name: rule_of(name, p) for name, p in model.named_parameters()}
    for name, rule in found.items():
        wanted = "sinkhorn" if name in SINKHORN else "adamw" if ADAMW.search(name) else "muon"
        assert rule == wanted, name
    assert {"layers.0.ffn.gate.weight", "layers.0.hc_attn.fn", "aligner.w1.weight"} <= {
        name for name, rule in found.items() if rule == "muon"
    }


def test_matrices_that_hold_several_are_taken_apart(model):
    shapes = dict(model.named_parameters())
    c, vision = CONFIG, CONFIG.vision

    def blocks(name: str) -> tuple[int, ...]:
        found = row_blocks(name, shapes[name], c)
        assert sum(found) == shapes[name].shape[-2]
        return found

    source = c.kv_source_layer_ids[0]
    assert blocks("layers.0.attn.wq_b.weight") == (c.head_dim,) * c.num_attention_heads
    assert blocks("layers.0.attn.wo_a.weight") == (c.o_lora_rank,) * c.o_groups
    index = blocks(f"layers.{source}.attn.indexer.wq_b.weight")
    assert index == (c.index_head_dim,) * c.index_n_heads
    inner = c.moe_intermediate_size
    assert blocks("layers.0.ffn.experts.w13") == (inner, inner)
    assert blocks("layers.0.ffn.shared_experts.w13.weight") == (inner, inner)
    assert blocks("layers.0.attn.wkv.weight") == (c.head_dim,)
    heads, width = vision.num_attention_heads, vision.hidden_size
    wanted = (*(width // heads,) * (2 * heads), width)
    assert blocks("vision.blocks.0.attn.wqkv.weight") == wanted


def test_a_step_moves_every_parameter_by_its_own_rule(config):
    torch.manual_seed(0)
    model = DeepseekV41(config.model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = build_optimizer(model, replace(config.optim, name="pretrain"), config.model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trained), name
    kinds = {key.rsplit("/", 1)[0]: set() for key in optimizer_tensors(optimizer)}
    for key in optimizer_tensors(optimizer):
        name, kind = key.rsplit("/", 1)
        kinds[name].add(kind)
    assert kinds.keys() == trained.keys()
    assert kinds["embed.weight"] == kinds["layers.0.attn.wq_a.weight"] == {"momentum"}
    assert kinds["norm.weight"] == {"step", "exp_avg", "exp_avg_sq"}


def test_a_run_repeats_bit_for_bit_and_goes_on_from_its_state(model):
    optim = OptimConfig("pretrain", 1e-2, 0, 0, 0, 0.0, 0.9, 0.95, 1e-20, 0.1, 5.0)

    def start() -> tuple[DeepseekV41, ParameterOptimizer]:
        made = copy.deepcopy(model).to_empty(device="cpu")
        for number, parameter in enumerate(made.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        return made, build_optimizer(made, optim, CONFIG)

    def learn(made: DeepseekV41, optimizer: ParameterOptimizer, steps: range) -> None:
        for step in steps:
            random = torch.Generator().manual_seed(1000 + step)
            for parameter in made.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=random)
            optimizer.step()

    through, again, stopped = start(), start(), start()
    learn(*through, range(2))
    learn(*again, range(2))
    learn(*stopped, range(1))
    resumed = build_optimizer(stopped[0], optim, CONFIG)
    saved = optimizer_tensors(stopped[1])
    for name, tensor in optimizer_tensors(resumed).items():
        tensor.copy_(saved[name])
    learn(stopped[0], resumed, range(1, 2))
    for name, parameter in through[0].named_parameters():
        assert torch.equal(parameter, again[0].get_parameter(name)), name
        assert torch.equal(parameter, stopped[0].get_parameter(name)), name
