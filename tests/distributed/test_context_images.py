"""A context group of ranks computes what one rank does, on text with images."""

from __future__ import annotations

import pytest

from tests.context import Case, Picture, compute, require_equal, tokens
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

CASES = {
    "several images, of uneven sizes": Case(
        [
            [
                [*tokens(5, 1), Picture(6, 8, 1), *tokens(4, 2)],
                [Picture(3, 3, 2), 5, Picture(10, 4, 3)],
            ]
        ]
    ),
    "one image over all shards, seen by one rank": Case([[[5, Picture(12, 12, 1), 6]]]),
    "images on the last shard alone": Case(
        [[tokens(40, 1), [Picture(3, 3, 1), 4]]], options={"recompute": "full"}
    ),
    "two rows": Case(
        [[tokens(20, 1), [Picture(3, 3, 1), 4]], [[Picture(7, 9, 5), *tokens(5, 3)]]],
        options={"recompute": "selective"},
    ),
}


@pytest.mark.parametrize(
    ("world", "name"), [*((4, name) for name in CASES), (2, "several images, of uneven sizes")]
)
def test_a_group_computes_what_one_rank_does(ranks: Ranks, world: int, name: str) -> None:
    wanted = compute(CASES[name])
    assert all(grad.any() for n, grad in wanted.grads.items() if n.startswith("vision."))
    for found in ranks.run(world, compute, CASES[name], world):
        require_equal(found, wanted)
