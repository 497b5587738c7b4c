"""Activation recomputation: the same bits, choices made once, less kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention.indexer import Indexer
from model.config import QatConfig
from model.recompute import as_before, run_twice

MODES = ["full", "selective"]
SHAPES = {
    "ratios 2 and 1": {},
    "bfloat16": {"dtype": "bfloat16"},
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


def gradients(rig, *micro_batches, between: Callable[[], None] = lambda: None):
    """All gradients of all losses, tables too, and the figures of the last forward; `between`
    happens after each forward."""
    rig.model.zero_grad(set_to_none=True)
    window = rig.store.open_window([m.rows for m in micro_batches])
    for i, m in enumerate(micro_batches):
        out = rig.model(m.inputs, engram=window.rows(i), labels=m.labels, balance=True, recall=True)
        between()
        parts = [out.loss_sum, out.balance_loss, out.index_loss]
        torch.stack([part for part in parts if part is not None]).sum().backward()
    grads = {n: p.grad.clone() for n, p in rig.model.named_parameters() if p.grad is not None}
    grads |= {f"table {i}": grad for i, grad in enumerate(window.grads)}
    return grads, out


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("distill", [False, True], ids=["frozen", "distill"])
def test_gradients_have_the_same_bits(
    make_config: Callable, make_rig: Callable, shape: str, distill: bool
) -> None:
    config = make_config(**SHAPES[shape], index_topk=4, qat=QatConfig())
    wanted = figures = None
    for mode in ("none", *MODES):
        rig = make_rig(config, distill=distill, recompute=mode)
        packs = [rig.pack([DOCUMENTS[:3], DOCUMENTS[3:]]), rig.pack([[tokens(11, 1)], []])]
        found, out = gradients(rig, *packs)
        if wanted is None or figures is None:
            wanted, figures = found, out
            assert all(g.any() for n, g in wanted.items() if ".indexer." not in n)
            assert any(".indexer." in n for n in wanted) == distill
        assert_same(found, wanted)
        for name, value in figures._asdict().items():
            same = getattr(out, name)
            assert value is same is None or torch.equal(value, same), name


@pytest.mark.parametrize("mode", MODES)
def test_choices_are_kept_not_made_again(
    make_config: Callable, make_rig: Callable, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers and indexers change their minds between forward and backward."""
    rig = make_rig(make_config(index_topk=4), recompute=mode)
    packed = rig.pack([DOCUMENTS])
    wanted, _ = gradients(rig, packed)
    calls = []
    select = Indexer.select
    monkeypatch.setattr(Indexer, "select", lambda *a, **k: calls.append(1) or select(*a, **k))

    @torch.no_grad()
    def disturb() -> None:
        generator = torch.Generator().manual_seed(4)
        for layer in rig.model.layers:
            layer.ffn.gate.bias.normal_(generator=generator)
            if layer.attn.role in ("source", "reindex"):
                layer.attn.indexer.wq_b.weight.normal_(generator=generator)

    found, _ = gradients(rig, packed, between=disturb)
    assert len(calls) == 3
    assert_same(found, wanted)
    changed, _ = gradients(rig, packed)
    assert not all(torch.equal(changed[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("mode", MODES)
def test_backward_can_come_twice_and_for_some_parameters(
    make_config: Callable, make_rig: Callable, mode: str
) -> None:
    rig = make_rig(make_config(index_topk=4), recompute=mode)
    packed = rig.pack([DOCUMENTS])
    wanted, _ = gradients(rig, packed)
    window = rig.store.open_window([packed.rows])
    out = rig.model(packed.inputs, engram=window.rows(0), labels=None)
    some = [rig.model.layers[2].attn.compressor.wkv.weight, rig.model.embed.weight]
    one = torch.autograd.grad(out.logits.sum(), some, retain_graph=True)
    two = torch.autograd.grad(out.logits.sum(), some)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(one, two, strict=True))
    assert len(wanted) > len(some)


def test_nothing_runs_twice_without_gradients(make_config: Callable, make_rig: Callable) -> None:
    rig = make_rig(make_config(), recompute="full")
    packed = rig.pack([DOCUMENTS])
    window = rig.store.open_window([packed.rows])
    with torch.no_grad():
        out = rig.model(packed.inputs, engram=window.rows(0))
    assert out.logits.grad_fn is None


class Storages(TorchDispatchMode):
    """The storages that operations gave back, to ask how many bytes of them live on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[override]
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                ref = StorageWeakRef(storage)
                self.seen[ref.cdata] = ref, storage.nbytes()
        return out

    def alive(self, *, apart: set[int]) -> int:
        """Bytes of what has not been freed, without the storages `apart`."""
        seen = [pair for key, pair in self.seen.items() if key not in apart]
        return sum(size for ref, size in seen if not ref.expired())


def kept_bytes(rig, packed) -> int:
    """What a forward leaves behind for backward, beside the weights."""
    window = rig.store.open_window([packed.rows])
    weights = {StorageWeakRef(p.untyped_storage()).cdata for p in rig.model.parameters()}
    with Storages() as storages:
        out = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels)
    assert out.loss_sum.grad_fn is not None
    return storages.alive(apart=weights)


def test_less_is_kept(make_config: Callable, make_rig: Callable) -> None:
    """Two layers more than the same model has otherwise: what one layer costs."""
    ratios, length = (0, 0, 2, 2, 1, 1, 1, 1), 256
    shallow, deep = (
        make_config(compress_ratios=ratios, num_hidden_layers=n, workspace_mb=1) for n in (6, 8)
    )
    config, per_layer = shallow, {}
    for mode in ("none", *MODES):
        sizes = []
        for c in (shallow, deep):
            rig = make_rig(c, recompute=mode)
            sizes.append(kept_bytes(rig, rig.pack([[tokens(length, 1)]])))
        per_layer[mode] = (sizes[1] - sizes[0]) / 2 / length
    streams, pre = 4 * config.hc_mult * config.hidden_size, 4 * config.hc_mult
    choices = 8 * config.num_experts_per_tok
    assert per_layer["full"] == pytest.approx(streams + pre + choices, rel=0.02)
    routed = 4 * config.hidden_size
    assert per_layer["selective"] == pytest.approx(per_layer["full"] + routed, rel=0.02)
    assert per_layer["none"] > 1.6 * per_layer["full"]


def test_run_twice_on_plain_functions() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, other = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(3))
    fixed = torch.randn(4, 4, generator=generator)
    graphs = []

    def run(x: Tensor, none: None, fixed: Tensor) -> tuple[Tensor | None, ...]:
        graphs.append(torch.is_grad_enabled())
        return (x @ w).sin() * fixed, None, (x * w).cos(), x + fixed

    def plain() -> Tensor:
        a, _, b, _ = run(x, None, fixed)
        assert a is not None and b is not None
        return (a * other).sum() + b.sum()

    wanted = torch.autograd.grad(plain(), [x, w, other])
    graphs.clear()
    a, nothing, b, unused = run_twice(run, [x, None, fixed], [w])  # type: ignore[list-item]
    assert nothing is None and a is not None and b is not None and unused is not None
    found = torch.autograd.grad((a * other).sum() + b.sum(), [x, w, other])
    assert graphs == [False, True]
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_a_value_of_before_passes_the_gradient_of_now() -> None:
    again = torch.tensor([1.0, 2.0], requires_grad=True)
    before = torch.tensor([1.5, 2.5])
    value = as_before(again.square(), before)
    assert torch.equal(value, before) and not before.requires_grad
    (grad,) = torch.autograd.grad((value * 3).sum(), again)
    assert grad.tolist() == [6.0, 12.0]
