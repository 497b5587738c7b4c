"""Which rank holds which row: against plain loops, and past what 32 bits can name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engram.distinct import Distinct
from model.engram.division import Division
from model.engram.plan import WindowPlan

DIVISIONS = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 5), st.integers(1, 4)
)


@settings(deadline=None, max_examples=60)
@given(DIVISIONS)
def test_every_row_has_one_owner_and_one_primary(division) -> None:
    rows, owners, replicas = division
    made = Division(tuple(rows), owners, replicas)
    for index, count in enumerate(rows):
        owned = [made.owned(index, owner) for owner in range(owners)]
        assert [row for low, high in owned for row in range(low, high)] == list(range(count))
        assert all(high - low <= -(-count // owners) for low, high in owned)
        for owner, (low, high) in enumerate(owned):
            mastered = [made.mastered(index, owner * replicas + k) for k in range(replicas)]
            assert [row for a, b in mastered for row in range(a, b)] == list(range(low, high))
    ranks = [made.rank(p) for p in range(owners * replicas)]
    assert sorted(ranks) == list(range(owners * replicas))
    assert [made.primary(rank) for rank in ranks] == list(range(owners * replicas))
    # Replicas are whole groups of adjacent ranks.
    assert ranks[::replicas] == list(range(owners))


@settings(deadline=None, max_examples=60)
@given(DIVISIONS, st.integers(0, 99), st.integers(0, 20))
def test_a_plan_numbers_rows_as_their_holders_do(division, seed, reads) -> None:
    rows, owners, replicas = division
    made = Division(tuple(rows), owners, replicas)
    dice = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, count, (1, reads, 1), generator=dice) for count in rows]
    asked = torch.stack(drawn, dim=2)
    plan = WindowPlan.of(Distinct.of([asked]), made)
    assert plan.ends[0] == 0 and plan.ends[-1] == plan.distinct.size
    # Walk the holders' rows, layer after layer, and see who is asked for what.
    stands: dict[tuple[int, int], int] = {}
    for p in range(owners * replicas):
        numbers = plan.at_primary[plan.ends[p] : plan.ends[p + 1]].tolist()
        held = [(i, row) for i in range(len(rows)) for row in range(*made.mastered(i, p))]
        wanted = [held[number] for number in numbers]
        assert wanted == sorted(wanted)
        own = p // replicas
        of_owner = [(i, row) for i in range(len(rows)) for row in range(*made.owned(i, own))]
        at_owner = plan.at_owner[plan.ends[p] : plan.ends[p + 1]].tolist()
        assert [of_owner[number] for number in at_owner] == wanted
        stands |= {key: plan.ends[p] + n for n, key in enumerate(wanted)}
    inverses = plan.inverses()[0]
    if owners * replicas == 1:  # each layer has its part of the buffer to itself
        firsts = [0, *torch.tensor([len(ids) for ids in plan.distinct.ids]).cumsum(0).tolist()]
        inverses = [own + first for own, first in zip(inverses, firsts[:-1], strict=True)]
    for index, (inverse, own) in enumerate(zip(inverses, drawn, strict=True)):
        assert inverse.flatten().tolist() == [stands[index, row] for row in own.flatten().tolist()]


def test_rows_past_32_bits_are_told_apart() -> None:
    rows = 3 * 2**32 + 5
    made = Division((7, rows), owners=8, replicas=2)
    ids = [2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**33, rows - 1]
    plan = WindowPlan.of(Distinct([torch.tensor([6]), torch.tensor(ids)], []), made)
    found = set()
    for p in range(16):
        low, high = made.mastered(1, p)
        first, end = made.mastered(0, p)
        for number in plan.at_primary[plan.ends[p] : plan.ends[p + 1]].tolist():
            if number >= end - first:
                found.add(low + number - (end - first))
                assert low <= max(found) < high
    assert found == set(ids)


def test_more_rows_than_a_rank_can_number_are_refused() -> None:
    Division((2**31 - 8, 7), owners=1, replicas=1)
    with pytest.raises(ValueError, match=r"parallel.engram_owners=1 leaves 2,147,483,648 .*more"):
        Division((2**31 - 7, 7), owners=1, replicas=1)
