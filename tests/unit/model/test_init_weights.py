"""Initial weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from model.config import VisionConfig
from model.init import init_weights
from model.transformer import DeepseekV41


def built(config, seed: int = 0) -> DeepseekV41:
    model = DeepseekV41(config)
    for p in model.parameters():
        p.data.fill_(float("nan"))
    init_weights(model, seed=seed, std=0.02)
    return model


def test_every_parameter_is_set_by_its_kind(make_config: Callable) -> None:
    tower = VisionConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=48,
        patch_size=4,
    )
    model = built(make_config(vision=tower))
    kinds = {"ones": 0, "zeros": 0, "normal": 0}
    for name, parameter in model.named_parameters():
        p = parameter.detach()
        assert p.isfinite().all(), name
        last = ["", *name.rsplit(".", 2)]
        if "norm" in last[-2] or last[-1] in ("scale", "q_weight", "k_weight"):
            kind, good = "ones", (p == 1).all()
        elif last[-1] in ("attn_sink", "base", "bias"):
            kind, good = "zeros", (p == 0).all()
        else:
            kind = "normal"
            spread = 5 / p.numel() ** 0.5
            good = abs(float(p.mean()) / 0.02) < spread and abs(float(p.std()) / 0.02 - 1) < spread
        assert good, (name, kind)
        kinds[kind] += 1
    assert min(kinds.values()) > 5
    assert not any(b.any() for b in model.buffers())


def test_a_parameter_does_not_depend_on_the_others(make_config: Callable) -> None:
    whole = dict(built(make_config()).named_parameters())
    short = dict(built(make_config(num_hidden_layers=4)).named_parameters())
    bare = dict(
        built(make_config(engram_layer_ids=(), engram_num_embeddings=())).named_parameters()
    )
    for other in (short, bare):
        assert len(other) < len(whole)
        assert all(torch.equal(p, whole[n]) for n, p in other.items())


def test_parameters_of_one_shape_differ(make_config: Callable) -> None:
    own = {n: p.detach() for n, p in built(make_config()).named_parameters()}
    one, two = own["layers.0.attn.wkv.weight"], own["layers.1.attn.wkv.weight"]
    assert abs(float(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1])) < 0.1
    experts = own["layers.0.ffn.experts.w13"]
    assert not torch.equal(experts[0], experts[1])


def test_seed_and_global_generator(make_config: Callable) -> None:
    torch.manual_seed(1)
    one = built(make_config(num_hidden_layers=3), seed=5)
    torch.manual_seed(2)
    two = built(make_config(num_hidden_layers=3), seed=5)
    other = built(make_config(num_hidden_layers=3), seed=6)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, other.embed.weight)


@pytest.mark.parametrize("std", [0.02, 1.5])
def test_std(make_config: Callable, std: float) -> None:
    model = DeepseekV41(make_config(num_hidden_layers=3))
    init_weights(model, seed=0, std=std)
    assert float(model.head.weight.std().detach()) == pytest.approx(std, rel=0.02)
