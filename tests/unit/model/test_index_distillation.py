"""Whole model: what the indexer learns from, against dense attention in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from model.attention.csa import AttentionContext, CSAttention
from model.config import QatConfig
from model.quantization.cache import fp8_fake_quant, mxfp4_fake_quant, nvfp4_fake_quant

SHAPES = {
    "ratios 2 and 1": {},
    "ratios 2 and 3": {
        "num_hidden_layers": 4,
        "compress_ratios": (2, 3, 3, 0),
        "kv_source_layer_ids": (0, 1),
        "index_source_layer_ids": (0, 1, 2),
        "candidate_source_layer_id": 1,
        "candidate_block_size": 2,
    },
}


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, 400, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENTS = [tokens(n, n) for n in (17, 1, 30, 2, 9)]


@pytest.fixture(scope="module")
def rigs(make_config: Callable, make_rig: Callable) -> dict:
    """Few entries are selected, so that there is a choice to learn; gates are steady."""
    return {
        name: make_rig(make_config(**shape, index_topk=4), steady=True, distill=True)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def rig(rigs: dict):
    return rigs["ratios 2 and 1"]


class Seen(NamedTuple):
    """What one index source was given, and what it published."""

    attn: CSAttention
    x: Tensor
    context: AttentionContext
    selected: Tensor


@contextmanager
def watching(model: nn.Module) -> Iterator[list[Seen]]:
    seen: list[Seen] = []

    def hook(module, args, out) -> None:
        if out.published is not None:
            x, context = args[0].detach(), args[1]
            seen.append(Seen(module, x, context, out.published.selected))

    handles = [layer.attn.register_forward_hook(hook) for layer in model.layers]  # type: ignore
    yield seen
    for handle in handles:
        handle.remove()


def forward(rig, packed, **options):
    window = rig.store.open_window([packed.rows])
    return rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels, **options)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """In float64, with gradient: the last channels, pairs as complex numbers."""
    n = 2 * turn.shape[-1]
    pairs = torch.view_as_complex(x[..., -n:].unflatten(-1, (-1, 2)).contiguous())
    turn = turn.to(torch.complex128).view(turn.shape[0], *[1] * (x.dim() - 2), -1)
    return torch.cat([x[..., :-n], torch.view_as_real(pairs * turn).flatten(-2)], dim=-1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-20) * weight


def through(rounding: Callable, x: Tensor, on: bool) -> Tensor:
    return x + (rounding(x.detach().float()).double() - x.detach()) if on else x


class Dense(NamedTuple):
    loss: Tensor  # summed over index sources
    recall: list[list[float]]  # by index source and query with a choice


def mass(
    q: Tensor, near: Tensor, entries: Tensor, sink: Tensor, window: Tensor, allowed: Tensor
) -> Tensor:
    """What all heads give each entry, [T, G]: one softmax over window, allowed entries, sink."""
    scores = torch.einsum("thd,nd->thn", q, torch.cat([near, entries])) * q.shape[-1] ** -0.5
    seen = torch.cat([window, allowed], dim=1)[:, None]
    sinks = sink[None, :, None].expand(len(q), -1, 1)
    p = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks], dim=-1).softmax(-1)
    return p[..., len(near) : -1].sum(1)


def dense(seen: list[Seen], qat: QatConfig) -> tuple[Dense, dict[str, Tensor]]:
    """Every head's probabilities over all tokens and entries, and all index scores, at once."""
    loss, recall = torch.zeros((), dtype=torch.float64), []
    weights: dict[str, Tensor] = {}
    entries = keys = torch.empty(0)
    for n, (module, x, context, selected) in enumerate(seen):
        attn = copy.deepcopy(module).double()
        index = {
            f"{n}.{k}": p.detach().requires_grad_() for k, p in attn.indexer.named_parameters()
        }
        weights |= index
        x, layout, turn = x.double(), context.layout, context.yarn
        where = torch.arange(len(x))
        with torch.no_grad():
            latent = norm(x @ attn.wq_a.weight.T, attn.q_norm.weight)
            q = rotated((latent @ attn.wq_b.weight.T).unflatten(-1, (8, -1)), turn)
            near = rotated(norm(x @ attn.wkv.weight.T, attn.kv_norm.weight), turn)
            near = through(fp8_fake_quant, near, qat.window_fp8)
            if attn.role == "source":
                comp, r = attn.compressor, attn.ratio
                pooled = x @ comp.wkv.weight.T
                if r > 1:
                    score = (x @ comp.wgate.weight.T).unflatten(0, (-1, r)).softmax(1)
                    pooled = (pooled.unflatten(0, (-1, r)) * score).sum(1)
                pooled = norm(pooled, comp.norm.weight)
                entries = through(nvfp4_fake_quant, rotated(pooled, turn[::r]), qat.main_fp4)
            # Window, entries: who sees what.
            age = where[:, None] - where
            window = (age >= 0) & (age < attn.settings.window) & (where >= layout.start[:, None])
            far, low, high = torch.arange(len(entries)), *vars(context.visible[attn.ratio]).values()
            visible = (far >= low[:, None]) & (far < high[:, None])
            picked = torch.zeros(len(x), len(entries) + 1, dtype=torch.bool)
            picked = picked.scatter_(1, selected.where(selected >= 0, len(entries)), True)[:, :-1]
            assert not (picked & ~visible).any()
            common = q, near, entries, attn.attn_sink, window
            everything = mass(*common, visible)
            share = (everything * picked).sum(1) / everything.sum(1)
            recall.append(share[visible.sum(1) > selected.shape[1]].tolist())
            target = mass(*common, picked)
            target = target / target.sum(1, keepdim=True)
        if attn.role == "source":
            key = norm(pooled @ index[f"{n}.wk.weight"].T, index[f"{n}.k_norm.weight"])
            keys = through(mxfp4_fake_quant, rotated(key, turn[::r]), qat.index_fp4)
        own = (latent @ index[f"{n}.wq_b.weight"].T).unflatten(-1, (attn.indexer.heads, -1))
        own = through(mxfp4_fake_quant, rotated(own, turn), qat.index_fp4)
        by_head = x @ index[f"{n}.weights_proj.weight"].T
        by_head = by_head * (attn.indexer.dim * attn.indexer.heads) ** -0.5
        scores = (torch.einsum("thd,gd->thg", own, keys).relu() * by_head[..., None]).sum(1)
        some = picked.any(1)
        log_p = scores.masked_fill(~picked, -torch.inf)[some].log_softmax(-1)
        each = torch.nn.functional.kl_div(
            log_p.where(picked[some], 0.0), target[some].where(picked[some], 0.0), reduction="sum"
        )
        loss = loss + each
    return Dense(loss, recall), weights


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_against_dense_attention(
    rigs: dict, relative: Callable, shape: str, quantised: bool
) -> None:
    rig = rigs[shape]
    packed = rig.pack([DOCUMENTS[:3], DOCUMENTS[3:]])
    qat = QatConfig(*[quantised] * 3)
    with switched(rig.model, qat), watching(rig.model) as seen:
        rig.model.zero_grad(set_to_none=True)
        out = forward(rig, packed)
        out.index_loss.backward()
    exact, weights = dense(seen, qat)
    assert len(seen) == 3 and out.index_loss > 1
    limit = 2e-3 if quantised else 1e-5  # a last bit can cross a rounding boundary
    assert relative(out.index_loss, exact.loss) < limit
    wanted = torch.autograd.grad(exact.loss, list(weights.values()))
    names = {id(s.attn): str(n) for n, s in enumerate(seen)}
    found = {
        f"{names[id(layer.attn)]}.{k}": p.grad
        for layer in rig.model.layers
        if id(layer.attn) in names
        for k, p in layer.attn.indexer.named_parameters()
    }
    assert found.keys() == weights.keys()
    for name, grad in zip(weights, wanted, strict=True):
        assert grad.any() and relative(found[name], grad) < 10 * limit, name


@contextmanager
def switched(model: nn.Module, qat: QatConfig) -> Iterator[None]:
    """Other quantisers for as long as the context lasts."""
    attns = [layer.attn for layer in model.layers]  # type: ignore[union-attr]
    before = attns[0].qat

    def use(new: QatConfig) -> None:
        for attn in attns:
            attn.qat = new
            if attn.role in ("source", "reindex"):
                attn.indexer.quantised = new.index_fp4

    use(qat)
    yield
    use(before)


def test_only_the_indexer_learns_from_it(rig) -> None:
    packed = rig.pack([DOCUMENTS])
    rig.model.zero_grad(set_to_none=True)
    window = rig.store.open_window([packed.rows])
    out = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels)
    out.index_loss.backward()
    touched = {n for n, p in rig.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {n for n, _ in rig.model.named_parameters() if ".indexer." in n}
    assert not any(g.any() for g in window.grads)


def test_the_rest_of_the_model_has_the_gradients_of_a_frozen_indexer(
    rig, make_config: Callable, make_rig: Callable
) -> None:
    frozen = make_rig(make_config(index_topk=4), steady=True)
    packed = rig.pack([DOCUMENTS])
    found = {}
    for name, one in (("learning", rig), ("frozen", frozen)):
        one.model.zero_grad(set_to_none=True)
        out = forward(one, packed)
        assert (out.index_loss is None) == (name == "frozen")
        (out.loss_sum + (out.index_loss or 0.0)).backward()
        found[name] = {n: p.grad for n, p in one.model.named_parameters()}
    for name, grad in found["frozen"].items():
        if ".indexer." in name:
            assert grad is None
        else:
            assert torch.equal(found["learning"][name], grad), name


def test_packed_documents_give_what_each_gives_alone(rig, relative: Callable) -> None:
    def run(*micro_batches) -> tuple[float, dict[str, Tensor]]:
        rig.model.zero_grad(set_to_none=True)
        total = 0.0
        for packed in micro_batches:
            loss = forward(rig, packed).index_loss
            loss.backward()
            total += float(loss.detach())
        named = rig.model.named_parameters()
        return total, {n: p.grad.clone() for n, p in named if ".indexer." in n}

    together = run(rig.pack([DOCUMENTS]))
    splits = {
        "alone": [rig.pack([[d]]) for d in DOCUMENTS],
        "rows": [rig.pack([DOCUMENTS[:2], DOCUMENTS[2:]])],
        "micro-batches": [rig.pack([DOCUMENTS[:3]]), rig.pack([DOCUMENTS[3:]], width=37)],
    }
    for name, packs in splits.items():
        loss, grads = run(*packs)
        assert loss == pytest.approx(together[0], rel=1e-5), name
        for parameter, grad in together[1].items():
            assert relative(grads[parameter], grad) < 1e-4, (name, parameter)


def test_padding_alone_gives_zero(rig) -> None:
    rig.model.zero_grad(set_to_none=True)
    out = forward(rig, rig.pack([[], []], width=9), recall=True)
    assert not out.index_loss
    assert out.index_recall.tolist() == [0.0, 0.0]
    out.index_loss.backward()
    grads = [p.grad for n, p in rig.model.named_parameters() if ".indexer." in n]
    assert all(g is not None and not g.any() for g in grads)


def test_queries_without_mass_are_safe(make_config: Callable, make_rig: Callable) -> None:
    """Sinks so large that they take all the probability."""
    rig = make_rig(make_config(index_topk=4), distill=True)
    with torch.no_grad():
        for layer in rig.model.layers:
            layer.attn.attn_sink.fill_(1e4)
    out = forward(rig, rig.pack([DOCUMENTS]), recall=True)
    assert not out.index_loss
    assert out.index_recall.tolist() == [0.0, 0.0]
    (out.loss_sum + out.index_loss).backward()
    grads = {n: p.grad for n, p in rig.model.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    assert not any(g.any() for n, g in grads.items() if ".indexer." in n)


def test_recall_against_dense_attention(rig, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = rig.pack([DOCUMENTS])
    with watching(rig.model) as seen:
        out = forward(rig, packed, recall=True)
    exact, _ = dense(seen, QatConfig(False, False, False))
    monkeypatch.setattr("model.attention.recall.PROBES", 1000)
    every = forward(rig, packed, recall=True).index_recall
    assert int(every[1]) == sum(map(len, exact.recall))
    assert float(every[0]) == pytest.approx(sum(map(sum, exact.recall)), rel=1e-5)
    sampled = [s[(2 * i + 1) * len(s) // 16] for s in exact.recall for i in range(8)]
    assert int(out.index_recall[1]) == len(sampled) == 24
    assert float(out.index_recall[0]) == pytest.approx(sum(sampled), rel=1e-5)
    assert 0.1 < sum(sampled) / 24 < 0.95


def test_nothing_is_computed_without_gradients_or_when_frozen(
    rig, make_config: Callable, make_rig: Callable
) -> None:
    packed = rig.pack([DOCUMENTS])
    with torch.no_grad():
        out = forward(rig, packed, recall=True)
    assert out.index_loss is out.index_recall is None
    frozen = make_rig(make_config(index_topk=4))
    out = forward(frozen, packed, recall=True)
    assert out.index_loss is out.index_recall is None
    assert not any(p.requires_grad for n, p in frozen.model.named_parameters() if "indexer" in n)


def test_learning_raises_the_recall(
    make_config: Callable, make_rig: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From scratch, 16 of up to 120 entries; sharp attention, so that some are worth more."""
    monkeypatch.setattr("model.attention.recall.PROBES", 1000)
    rig = make_rig(make_config(index_topk=16, candidate_topk_blocks=10), distill=True)
    with torch.no_grad():
        for layer in rig.model.layers:
            layer.attn.wq_b.weight.mul_(3)
    packed = rig.pack([[tokens(120, 1)]])
    indexer = [p for n, p in rig.model.named_parameters() if ".indexer." in n]
    optimizer = torch.optim.Adam(indexer, lr=1e-2)
    losses, recalls = [], []
    for step in range(13):
        out = forward(rig, packed, recall=step in (0, 12))
        (out.index_loss / 360).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.index_loss.item())
        if out.index_recall is not None:
            recalls.append(float(out.index_recall[0] / out.index_recall[1]))
    assert losses[-1] < 0.7 * losses[0]
    assert recalls[1] > recalls[0] + 0.08
