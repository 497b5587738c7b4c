"""What the ranks of a context group send each other, against plain loops, and how often."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from model.parallel.columns import Columns
from model.parallel.gather import gather
from model.parallel.group import Group
from model.parallel.halo import halo
from model.parallel.mesh import build_mesh
from tests.context import Case, Picture, compute, tokens
from tests.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")

WORLD, WIDTH = 4, 3
SHAPES = list(product([1, 2], [1, 2, 5], [1, 3, 4, 30]))  # rows, columns of a rank, of the halo


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exchanged() -> list[list[Tensor]]:
    group = build_mesh(cp=WORLD).cp
    found = []
    for number, (rows, n, width) in enumerate(SHAPES):
        columns = Columns(group, rows)
        x = columns.own(values(rows * n * WORLD, WIDTH, seed=number)).requires_grad_()
        before = halo(x, columns, width=width)
        weight = values(WORLD, *before.shape, seed=-1 - number)[group.rank]
        (grad,) = torch.autograd.grad(before, x, weight)
        again = halo(x, columns, width=width, known=before.detach())
        (same,) = torch.autograd.grad(again, x, weight)
        every = gather(x, columns)
        (back,) = torch.autograd.grad(every, x, every.detach() * (group.rank + 1))
        assert torch.equal(again, before)
        assert torch.equal(same, grad)
        found.append([before.detach(), grad, every.detach(), back])
    return found


def test_halo_and_gather(ranks: Ranks) -> None:
    results = ranks.run(WORLD, exchanged)
    for number, (rows, n, width) in enumerate(SHAPES):
        x = values(rows * n * WORLD, WIDTH, seed=number)
        whole = x.view(rows, n * WORLD, WIDTH)
        weights = values(WORLD, rows, width, WIDTH, seed=-1 - number)
        grad = torch.zeros_like(whole)
        for rank in range(WORLD):
            before, _, every, back = results[rank][number]
            for i in range(width):
                column = rank * n - width + i
                wanted = whole[:, column] if column >= 0 else torch.zeros(rows, WIDTH)
                assert torch.equal(before[:, i], wanted)
                if column >= 0:
                    grad[:, column] += weights[rank, :, i]
            assert torch.equal(every, x)
            own = whole[:, rank * n : (rank + 1) * n].flatten(0, 1)
            torch.testing.assert_close(back, own * sum(range(1, WORLD + 1)))
        for rank in range(WORLD):
            own = grad[:, rank * n : (rank + 1) * n].flatten(0, 1)
            torch.testing.assert_close(results[rank][number][1], own)


def listened(name: str, log: list[str]) -> Callable:
    method = getattr(Group, name)

    def call(self: Group, *args, **options):
        if self.size > 1:
            log.append(name)
        return method(self, *args, **options)

    return call


def calls(case: Case) -> list[str]:
    """The collectives of a forward, a backward and another forward, in order."""
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_rows", "all_gather", "reduce_scatter_sum", "all_reduce_sum"):
            patch.setattr(Group, name, listened(name, log))
        compute(case, WORLD)
    return log


UNEVEN = [
    [[5, Picture(3, 3, 1), *tokens(2, 1)], tokens(1, 2), tokens(12, 3)],
    [tokens(2, 4)],
]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_ranks_make_the_same_calls(ranks: Ranks, recompute: str) -> None:
    """A rank without images or labels, one of padding alone, documents shorter than the ratio: no
    difference. Compressed entries are gathered at their two sources; running layers again sends
    nothing but the balance loss's counts again."""
    case = Case(UNEVEN, width=64, options={"recompute": recompute})
    first, *others = ranks.run(WORLD, calls, case)
    assert all(other == first for other in others)
    # Three passes: halos of six layers and the images' features.
    assert first.count("all_to_all_rows") == 3 * (6 + 1)
    # Entries and keys of two sources in two forwards, then the logits that the test compares.
    assert first.count("all_gather") == 2 * 2 * 2 + 1
    # The indexer is frozen: keys have no gradient.
    assert first.count("reduce_scatter_sum") == 2
