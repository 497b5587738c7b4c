"""The balance loss against a loop over documents, and what it may not depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.layout import Documents, Layout, ModelInputs
from model.moe.balance import balance_sum
from model.moe.router import Router

EXPERTS, K = 8, 2


def slow(scores: Tensor, experts: Tensor, documents: list[range]) -> Tensor:
    """sum over documents of T * sum_i f_i P_i, by the definition."""
    total = scores.new_zeros(())
    for document in documents:
        tokens = len(document)
        count = [0] * EXPERTS
        for t in document:
            for e in experts[t].tolist():
                count[e] += 1
        for i in range(EXPERTS):
            f = EXPERTS / (K * tokens) * count[i]
            p = sum(scores[t, i] / scores[t].sum() for t in document) / tokens
            total = total + tokens * f * p
    return total


def laid_out(lengths: list[int], gaps: list[int]) -> tuple[Documents, list[range]]:
    """Documents of these lengths in one row, each followed by so much padding."""
    seq, position, places, at = [], [], [], 0
    for number, (n, gap) in enumerate(zip(lengths, gaps, strict=True), start=1):
        seq += [number] * n + [0] * gap
        position += [*range(n), *[0] * gap]
        places.append(range(at, at + n))
        at += n + gap
    rows = [torch.tensor([r]) for r in (seq, position)]
    types = torch.full_like(rows[0], -1)
    layout = Layout.of(ModelInputs(rows[0], rows[0], rows[1], types))
    return layout.documents(), places


def drawn(documents: Documents, seed: int) -> tuple[Tensor, Tensor]:
    """Scores [T, E] float64 and choices [T, K]; a token's are those of its place."""
    tokens, generator = len(documents.index), torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator, dtype=torch.float64) + 0.01
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :K]
    experts[documents.index == len(documents.lengths)] = EXPERTS
    return scores.requires_grad_(), experts


lengths_and_gaps = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(lengths_and_gaps, st.integers(0, 2**31))
def test_value_and_gradient(pieces: list[tuple[int, int]], seed: int) -> None:
    lengths, gaps = map(list, zip(*pieces, strict=True))
    documents, places = laid_out(lengths, gaps)
    assert documents.lengths.tolist() == lengths
    scores, experts = drawn(documents, seed)
    found, wanted = balance_sum(scores, experts, documents), slow(scores, experts, places)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    by_found, by_wanted = (torch.autograd.grad(v, scores)[0] for v in (found, wanted))
    torch.testing.assert_close(by_found, by_wanted, rtol=1e-6, atol=1e-7)
    dead = documents.index == len(lengths)
    assert not by_found[dead].any()


def test_even_use_gives_one_a_token_and_a_collapse_gives_the_experts_over_k() -> None:
    documents, _ = laid_out([8, 4], [1, 0])
    experts = (torch.arange(13)[:, None] * K + torch.arange(K)) % EXPERTS
    experts[8] = EXPERTS
    scores = torch.full((13, EXPERTS), 0.7)
    assert float(balance_sum(scores, experts, documents)) == pytest.approx(12)
    experts[:8] = torch.arange(K)
    scores[:8] = 1e-9
    scores[:8, :K] = 1.0
    assert float(balance_sum(scores, experts, documents)) == pytest.approx(8 * EXPERTS / K + 4)


def test_only_padding_is_nothing() -> None:
    seq = torch.zeros(1, 6, dtype=torch.int64)
    documents = Layout.of(ModelInputs(seq, seq, seq, seq - 1)).documents()
    scores = torch.rand(6, EXPERTS).requires_grad_()
    found = balance_sum(scores, torch.full((6, K), EXPERTS), documents)
    assert found == 0
    assert not torch.autograd.grad(found, scores)[0].any()


def halves(documents: Documents) -> Iterator[tuple[slice, Documents]]:
    for row in (slice(0, 12), slice(12, 24)):
        index = documents.index[row]
        first = int(index.min())
        lengths = documents.lengths[first : int(index.max()) + 1]
        yield row, Documents(index - first, lengths)


def test_split_over_micro_batches_it_is_the_same_to_the_bit_of_the_gradient() -> None:
    documents, _ = laid_out([5, 7, 3, 9], [0] * 4)
    scores, experts = drawn(documents, 3)
    scores = scores.detach().float().requires_grad_()
    whole = balance_sum(scores, experts, documents)
    parts = [balance_sum(scores[at], experts[at], own) for at, own in halves(documents)]
    both = parts[0] + parts[1]
    torch.testing.assert_close(both, whole, rtol=1e-6, atol=0)
    one, two = (torch.autograd.grad(v, scores)[0] for v in (whole, both))
    assert torch.equal(one, two)


def test_the_router_gives_it_when_asked_and_its_bias_gets_no_gradient(
    make_config: Callable,
) -> None:
    own = Router(make_config())
    torch.nn.init.normal_(own.weight, generator=torch.Generator().manual_seed(0))
    own.bias[3] = 100.0  # everything chooses 3, whatever its score
    documents, places = laid_out([5, 7], [1, 0])
    x = torch.randn(13, 64, generator=torch.Generator().manual_seed(1))
    live = documents.index < 2
    assert own(x, live, ~live).balance is None
    routing = own(x, live, torch.zeros_like(live), documents)
    scores = torch.log1p((x.double() @ own.weight.double().T).exp()).sqrt()
    wanted = slow(scores, routing.experts, places)
    assert routing.balance.item() == pytest.approx(wanted.item(), rel=1e-5)
    (by_weight,) = torch.autograd.grad(routing.balance, own.weight)
    assert by_weight.any()


def test_a_document_has_the_same_loss_alone_and_packed(
    make_config: Callable, make_rig: Callable
) -> None:
    """Through the whole model: value and gradients add up over documents, however they lie."""
    rig = make_rig(make_config(), steady=True)
    documents = [list(range(9, 9 + n)) for n in (13, 6, 1, 22)]

    def run(*rows: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
        rig.model.zero_grad(set_to_none=True)
        packed = rig.pack(list(rows))
        window = rig.store.open_window([packed.rows])
        out = rig.model(packed.inputs, engram=window.rows(0), labels=packed.labels, balance=True)
        out.balance_loss.backward()
        named = rig.model.named_parameters()
        return out.balance_loss.detach(), {n: p.grad for n, p in named if p.grad is not None}

    alone = [run([document]) for document in documents]
    value = torch.stack([loss for loss, _ in alone]).sum()
    for rows in ([documents], [documents[:2], documents[2:]], [[d] for d in documents]):
        packed, grads = run(*rows)
        torch.testing.assert_close(packed, value, rtol=1e-5, atol=0)
        assert grads.keys() == alone[0][1].keys()
        for name, grad in grads.items():
            wanted = torch.stack([found[name] for _, found in alone]).sum(0)
            assert (grad - wanted).norm() <= 1e-4 * wanted.norm(), name
    assert "layers.3.ffn.gate.weight" in grads and "head.weight" not in grads
