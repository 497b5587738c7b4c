"""bfloat16: what is rounded where, and what stays fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.attention.compressor import Compressor
from model.attention.indexer import Indexer
from model.precision import Linear, is_fp32, wide_linear

DOCUMENTS = [[list(range(9, 40)), [7, 8, 9, 10, 11]]]
ISLANDS = [
    "layers.2.hc_attn.fn",
    "layers.0.hc_ffn.base",
    "layers.3.hc_ffn.scale",
    "layers.1.attn.attn_sink",
    "layers.2.attn.compressor.wkv.weight",
    "layers.2.attn.compressor.wgate.weight",
    "head.weight",
]


@pytest.fixture(scope="module")
def rig(make_config: Callable, make_rig: Callable):
    return make_rig(make_config(dtype="bfloat16"))


def rounded(names: Callable[[str], bool], rig, *documents) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients with the tensors of these names rounded to bfloat16 beforehand."""
    named = [(n, t) for n, t in rig.model.named_parameters() if names(n)]
    before = [t.detach().clone() for _, t in named]
    try:
        with torch.no_grad():
            for _, t in named:
                t.copy_(t.bfloat16())
        out = rig.run(rig.pack(*documents))
    finally:
        with torch.no_grad():
            for (_, t), old in zip(named, before, strict=True):
                t.copy_(old)
    return out.logits, out.grads


def test_every_parameter_but_the_islands_is_rounded_where_it_is_used(rig) -> None:
    assert all(p.dtype == torch.float32 for p in rig.model.parameters())
    # Also the projection of a compressor of ratio 1.
    free = {n for n, _ in rig.model.named_parameters() if not is_fp32(n)}
    free.add("layers.4.attn.compressor.wkv.weight")
    logits, grads = rounded(lambda n: False, rig, DOCUMENTS)
    same_logits, same_grads = rounded(free.__contains__, rig, DOCUMENTS)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, same_logits)
    assert [n for n in grads if not torch.equal(grads[n], same_grads[n])] == []
    assert all(g.dtype == torch.float32 for g in grads.values())


@pytest.mark.parametrize("island", ISLANDS)
def test_islands_are_used_unrounded(rig, island: str) -> None:
    assert is_fp32(island)
    logits, _ = rounded(lambda n: False, rig, DOCUMENTS)
    other, _ = rounded(lambda n: n == island, rig, DOCUMENTS)
    assert not torch.equal(logits, other)


def test_the_islands_are_these(rig) -> None:
    tensors = [*rig.model.named_parameters(), *rig.model.named_buffers()]
    kinds = {
        n.split(".", 2)[-1] if n.startswith("layers.") else n for n, _ in tensors if is_fp32(n)
    }
    assert kinds == {
        *(f"hc_{site}.{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")),
        "attn.attn_sink",
        "attn.compressor.wkv.weight",
        "attn.compressor.wgate.weight",
        "ffn.gate.bias",
        "ffn.gate.bias_vl",
        "head.weight",
    }
    assert is_fp32("vision.norm.weight") and is_fp32("vision.blocks.3.norm2.weight")
    assert not is_fp32("norm.weight") and not is_fp32("vision.blocks.0.attn.wqkv.weight")


def test_the_streams_are_narrow_and_the_mixes_wide(rig) -> None:
    seen = []
    handles = [
        layer.register_forward_hook(lambda _m, _a, out: seen.append((out.streams, out.pre)))
        for layer in rig.model.layers
    ]
    rig.run(rig.pack(DOCUMENTS))
    for handle in handles:
        handle.remove()
    assert {s.dtype for s, _ in seen} == {torch.bfloat16}
    assert {p.dtype for _, p in seen} == {torch.float32}


def test_gradients_of_many_equal_tokens_do_not_saturate(rig) -> None:
    """2,000 equal tokens: their rows' gradient is a sum that bfloat16 would stop at 256 steps."""
    ids = torch.full((2000,), 5)
    weight = rig.model.embed.weight
    (grad,) = torch.autograd.grad(rig.model.embed(ids).bfloat16().sum(), weight)
    assert grad[5].tolist() == [2000.0] * weight.shape[1]


def test_a_linear_rounds_its_weight_and_hands_back_a_wide_gradient() -> None:
    own = Linear(8, 4)
    x = torch.randn(3, 8).bfloat16()
    out = own(x)
    assert torch.equal(out, x @ own.weight.bfloat16().t())
    out.sum().backward()
    assert own.weight.grad is not None and own.weight.grad.dtype == torch.float32


def test_a_wide_product_of_narrow_numbers(relative: Callable) -> None:
    x = torch.randn(5, 16).bfloat16().requires_grad_()
    weight = torch.randn(7, 16).requires_grad_()
    out = wide_linear(x, weight)
    wide_x, wide_w = (t.detach().double().requires_grad_() for t in (x, weight))
    wanted = wide_x @ wide_w.t()
    assert relative(out, wanted) < 1e-6
    grad = torch.randn(5, 7)
    found = torch.autograd.grad((out * grad).sum(), [x, weight])
    exact = torch.autograd.grad((wanted * grad.double()).sum(), [wide_x, wide_w])
    assert torch.equal(found[0], exact[0].bfloat16())
    assert relative(found[1], exact[1]) < 1e-6


def test_the_compressor_of_ratio_1_multiplies_in_the_activations_type(
    make_config: Callable,
) -> None:
    own = Compressor(make_config(), 1)
    torch.nn.init.normal_(own.wkv.weight)
    torch.nn.init.ones_(own.norm.weight)
    x = torch.randn(9, 64).bfloat16()
    wanted = own.norm(x @ own.wkv.weight.bfloat16().t())
    assert torch.equal(own(x), wanted)
    wide = own.norm((x.float() @ own.wkv.weight.t()).bfloat16())
    assert not torch.equal(own(x), wide)


def test_index_scores_are_rounded_at_each_step(make_config: Callable) -> None:
    """The product of query and key, its weighing, and the sum over heads: bfloat16 each time."""
    own = Indexer(make_config(), makes_keys=True)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(4, own.heads, own.dim, generator=generator).bfloat16()
    keys = torch.randn(6, own.dim, generator=generator).bfloat16()
    weights = torch.randn(4, own.heads, generator=generator).bfloat16()
    found = own._dense(q, weights, keys)
    assert found.dtype == torch.bfloat16
    for t in range(4):
        for g in range(6):
            products = [(q[t, h].double() @ keys[g].double()).bfloat16() for h in range(own.heads)]
            terms = [p.relu() * w for p, w in zip(products, weights[t], strict=True)]
            total = sum(float(term) for term in terms)
            assert float(found[t, g]) == pytest.approx(total, rel=2**-8, abs=1e-6)
            assert found[t, g] == torch.tensor(total).bfloat16()
