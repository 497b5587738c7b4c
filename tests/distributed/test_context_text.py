"""A context group of ranks computes what one rank does, on packed text."""

from __future__ import annotations

import pytest
import torch

from tests.context import Case, compute, require_equal, tokens
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def documents(*lengths: int) -> list[list[int]]:
    return [tokens(n, seed) for seed, n in enumerate(lengths, start=1)]


RATIO_4 = {
    "num_hidden_layers": 4,
    "compress_ratios": (0, 4, 4, 4),
    "kv_source_layer_ids": (1,),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": 1,
    "candidate_block_size": 2,
}
LEARNING = {"distill": True}
CASES = {
    "a document over all shards": Case([documents(64)]),
    "borders of documents and shards apart": Case([documents(13, 1, 22, 2, 17)]),
    "two rows": Case([documents(30, 9), documents(5, 3, 1, 20)]),
    "shards below the window": Case([documents(9, 5)]),
    "an odd length": Case([documents(37)]),
    "shards of padding": Case([documents(7)], width=48),
    "nothing but padding": Case([[]], width=16),
    "documents below the ratio": Case([documents(3, 30, 1, 2)], changes=RATIO_4),
    "few entries chosen, tiles": Case(
        [documents(70, 21)], changes={"index_topk": 4, "workspace_mb": 1}
    ),
    "an indexer that learns": Case(
        [documents(40, 13)], changes={"index_topk": 4}, options=LEARNING
    ),
    "full": Case(
        [documents(40, 13)],
        changes={"index_topk": 4},
        options=LEARNING | {"recompute": "full"},
    ),
    "selective": Case(
        [documents(40, 13), documents(20)],
        changes={"index_topk": 4},
        options=LEARNING | {"recompute": "selective"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_compute_what_one_does(ranks: Ranks, name: str) -> None:
    wanted = compute(CASES[name])
    for found in ranks.run(4, compute, CASES[name], 4):
        require_equal(found, wanted)


@pytest.mark.parametrize("name", ["borders of documents and shards apart", "full"])
def test_two_ranks_compute_what_one_does(ranks: Ranks, name: str) -> None:
    wanted = compute(CASES[name])
    for found in ranks.run(2, compute, CASES[name], 2):
        require_equal(found, wanted)


def test_a_documents_bits_do_not_depend_on_its_neighbours(ranks: Ranks) -> None:
    """Three ranks; the documents before and after lie on the same ones."""
    middle = tokens(25, 1)
    results = []
    for seed in (2, 3):
        rows = [[tokens(9, seed), middle, tokens(12, seed + 2)]]
        case = Case(rows, learnt=1, options={"steady": False})
        results.append(ranks.run(3, compute, case, 3)[1])
    one, other = results
    assert torch.equal(one.logits[0, 10:35], other.logits[0, 10:35])
    assert not torch.equal(one.logits[0, :9], other.logits[0, :9])
    assert all(torch.equal(one.grads[name], other.grads[name]) for name in one.grads)
    assert sum(bool(grad.any()) for grad in one.grads.values()) > 60
