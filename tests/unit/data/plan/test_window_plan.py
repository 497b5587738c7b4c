"""What a plan promises: every token once, aligned, nothing across borders, little padding."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache.encoded import SPAN
from data.errors import DataError
from data.plan.settings import PlanSettings
from data.plan.window import WindowPlan, plan_window

NO_IMAGES = np.zeros(0, dtype=SPAN)


def plan(lengths, *, window=0, spans=NO_IMAGES, **changes) -> WindowPlan:
    given = {"pack_length": 64, "alignment": 2, "on_long_document": "split"}
    given |= {"holdout": 0.0, "seed": 1} | changes
    return plan_window(
        window=window,
        offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        spans=spans,
        settings=PlanSettings(**given),
        origin=lambda document: f"file:{document}",
    )


def pieces_of(found: WindowPlan, pack: int) -> list[tuple[int, int, int]]:
    """(start, length, column) of a pack's pieces."""
    here = slice(int(found.pack_offsets[pack]), int(found.pack_offsets[pack + 1]))
    arrays = (found.starts[here], found.lengths[here], found.columns[here])
    return list(zip(*(array.tolist() for array in arrays), strict=True))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=40),
    alignment=st.sampled_from([1, 2, 4, 8]),
    groups=st.integers(1, 5),
    holdout=st.sampled_from([0.0, 0.2, 0.9]),
    window=st.integers(0, 2),
)
def test_every_token_stands_once_aligned_and_apart(lengths, alignment, groups, holdout, window):
    length = alignment * groups * 2
    found = plan(lengths, window=window, pack_length=length, alignment=alignment, holdout=holdout)
    borders = np.cumsum([0, *lengths])
    times = np.zeros(borders[-1], dtype=int)
    sides: dict[int, set[bool]] = {}
    for pack in range(len(found)):
        pieces, taken = pieces_of(found, pack), 0
        assert pieces
        for start, size, column in pieces:
            assert column % alignment == 0
            assert taken <= column < taken + alignment  # no more than alignment slots between
            taken = column + size
            times[start : start + size] += 1
            document = int(np.searchsorted(borders, start, side="right")) - 1
            assert start + size <= borders[document + 1]
            sides.setdefault(document, set()).add(pack < found.training)
        assert taken <= length
    assert (times == 1).all()
    assert all(len(side) == 1 for side in sides.values())
    held = sum(side == {False} for side in sides.values())
    least = 1 if holdout and window == 0 else 0
    assert held == max(0, min(max(least, round(holdout * len(lengths))), len(lengths) - 1))


def test_a_plan_is_a_function_of_its_arguments():
    lengths = np.random.default_rng(0).integers(2, 90, 200)
    one, two = plan(lengths, holdout=0.1), plan(lengths, holdout=0.1)
    for name in ("pack_offsets", "starts", "lengths", "columns"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    other = plan(lengths, holdout=0.1, seed=2)
    assert sorted(one.starts) == sorted(other.starts)
    assert one.starts.tolist() != other.starts.tolist()


@pytest.mark.parametrize("mean", [6.0, 7.0, 8.0])
@pytest.mark.parametrize("alignment", [1, 2])
def test_padding_of_log_normal_documents(mean, alignment):
    """At most 1e-4 besides the slots behind documents, which an alignment leaves in any case."""
    lengths = np.random.default_rng(1).lognormal(mean, 1.0, 100_000).astype(np.int64).clip(2)
    found = plan(lengths, pack_length=8192, alignment=alignment)
    aligned = int((-(-found.lengths.astype(np.int64) // alignment) * alignment).sum())
    assert found.lengths.sum() == lengths.sum()
    assert 1 - aligned / (len(found) * 8192) < 1e-4


def test_memory_is_a_small_constant_per_document():
    lengths = np.random.default_rng(2).lognormal(5, 1.0, 2**17).astype(np.int64).clip(2)
    peaks = []
    for count in (2**15, 2**17):
        tracemalloc.start()
        plan(lengths[:count], pack_length=8192, holdout=0.01)
        peaks.append(tracemalloc.get_traced_memory()[1] / count)
        tracemalloc.stop()
    assert max(peaks) < 150


def test_no_document_gives_no_pack():
    assert len(plan([])) == 0
    found = plan([5])
    assert (len(found), found.training) == (1, 1)


def test_documents_without_a_place_are_named():
    with pytest.raises(DataError, match=r"file:1: 65 tokens.*pack of 64.*raise data\.pack_length"):
        plan([9, 65], on_long_document="refuse")
    spans = np.zeros(1, dtype=SPAN)
    spans["document"], spans["rows"], spans["cols"] = 1, 9, 7
    with pytest.raises(DataError, match=r"file:1: an image takes 74 tokens.*max_image_tokens"):
        plan([9, 80], spans=spans)
    found = plan([9, 80], spans=spans, on_long_document="drop")
    assert (len(found), found.dropped.tolist()) == (1, [1])


def test_images_are_found_by_their_place_in_the_window():
    spans = np.zeros(2, dtype=SPAN)
    spans["document"], spans["offset"], spans["rows"], spans["cols"] = [0, 2], [3, 1], 1, 1
    assert plan([9, 4, 7], spans=spans).image_starts.tolist() == [3, 14]
