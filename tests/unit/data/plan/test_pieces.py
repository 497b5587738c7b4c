"""Long documents are cut into pieces, images never."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache.encoded import SPAN
from data.plan.pieces import TooLongError, cut, ranges

NO_IMAGES = np.zeros(0, dtype=SPAN)


def spans_of(images) -> np.ndarray:
    """images: (document, offset, rows, cols) each."""
    spans = np.zeros(len(images), dtype=SPAN)
    for span, (document, offset, rows, cols) in zip(spans, images, strict=True):
        span["document"], span["offset"], span["rows"], span["cols"] = document, offset, rows, cols
    return spans


def offsets_of(lengths) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


@st.composite
def documents(draw):
    """(lengths, images, longest span) of documents whose images stand apart."""
    lengths, images = [], []
    for document in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, 15))
        for _ in range(draw(st.integers(0, 4))):
            rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            images.append((document, at, rows, cols))
            at += rows * (cols + 1) + 2 + draw(st.integers(0, 9))
        lengths.append(max(2, at + draw(st.integers(0, 40))))
    return lengths, images


@settings(deadline=None)
@given(documents(), st.integers(14, 30), st.data())
def test_pieces_are_the_documents_cut_between_images(case, pack_length, data):
    lengths, images = case
    offsets = offsets_of(lengths)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))))
    pieces = cut(
        chosen, offsets=offsets, spans=spans_of(images), pack_length=pack_length, on_long="split"
    )
    found = list(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True))
    assert all(0 < length <= pack_length for _, length in found)
    inside = {
        int(offsets[document]) + offset + i
        for document, offset, rows, cols in images
        for i in range(1, rows * (cols + 1) + 2)
    }
    assert not inside & {start for start, _ in found}
    expected, at = [], iter(found)
    for document in chosen.tolist():
        first, end = int(offsets[document]), int(offsets[document + 1])
        while first < end:
            start, length = next(at)
            assert start == first
            first += length
            # No shorter than it must be: at the pack's end, or before an image that crosses it.
            assert first == end or length == pack_length or start + pack_length in inside
        assert first == end
        expected.append(document)
    assert next(at, None) is None
    assert len(pieces.dropped) == 0


def test_what_is_longer_than_a_pack_is_dropped_or_refused_where_asked():
    offsets, all_of_them = offsets_of([5, 11, 10, 30]), np.arange(4)

    def with_setting(on_long):
        return cut(all_of_them, offsets=offsets, spans=NO_IMAGES, pack_length=10, on_long=on_long)

    pieces = with_setting("drop")
    assert (pieces.starts.tolist(), pieces.lengths.tolist()) == ([0, 16], [5, 10])
    assert pieces.dropped.tolist() == [1, 3]
    with pytest.raises(TooLongError) as refused:
        with_setting("refuse")
    assert (refused.value.document, refused.value.longest) == (1, 11)
    pieces = with_setting("split")
    assert pieces.lengths.tolist() == [5, 10, 1, 10, 10, 10, 10]


def test_an_image_longer_than_a_pack_has_no_place():
    spans = spans_of([(1, 3, 2, 4)])  # 12 tokens
    with pytest.raises(TooLongError) as refused:
        cut(np.arange(2), offsets=offsets_of([4, 20]), spans=spans, pack_length=11, on_long="split")
    assert (refused.value.document, refused.value.longest) == (1, 12)


def test_ranges():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
