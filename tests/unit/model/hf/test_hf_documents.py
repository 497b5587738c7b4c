"""Inputs as users of transformers give them, turned into aligned documents and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.hf.documents import AlignedRows, document_positions, sequence_ids

IDS = torch.arange(12).view(2, 6)


def test_without_a_description_a_row_is_one_document():
    assert sequence_ids(IDS).tolist() == [[1] * 6] * 2


def test_attention_mask_may_pad_either_side():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    found = sequence_ids(IDS, attention_mask=mask)
    assert torch.equal(found, mask)
    assert document_positions(found).tolist() == [[0, 0, 0, 1, 2, 3], [0, 1, 2, 0, 0, 0]]


def test_lengths_with_and_without_room():
    lengths = torch.tensor([[2, 3], [4, -1]])
    assert sequence_ids(IDS, seq_lens=lengths).tolist() == [[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    room = torch.tensor([[3, 3], [4, 0]])
    found = sequence_ids(IDS, seq_lens=lengths, seq_lens_padded=room)
    assert found.tolist() == [[1, 1, 0, 2, 2, 2], [1, 1, 1, 1, 0, 0]]


def test_positions_alone_say_where_documents_start():
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    found = sequence_ids(IDS, position_ids=positions)
    assert found.tolist() == [[1, 1, 2, 2, 2, 3], [1] * 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask has shape"),
        ({"seq_lens_padded": torch.ones(2, 1)}, "needs seq_lens"),
        ({"seq_lens": torch.tensor([[4, 3], [6, 0]])}, "more than the 6 columns"),
        ({"seq_lens": torch.tensor([[2], [2]]), "seq_ids": IDS}, "give one of them"),
        ({"seq_ids": torch.tensor([[1, 2, 1, 1, 1, 1], [1] * 6])}, "stand together"),
        ({"position_ids": torch.tensor([[0, 1, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]])}, r"\[0, 2\]=3"),
        (
            {"seq_lens": torch.tensor([[6], [6]]), "attention_mask": torch.zeros(2, 6)},
            "disagree",
        ),
        (
            {"seq_lens": torch.tensor([[4], [6]]), "seq_lens_padded": torch.tensor([[3], [6]])},
            "below that of seq_lens",
        ),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sequence_ids(IDS, **arguments)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([1, 2, 3, 4]),
)
def test_aligned_rows_put_every_document_at_a_multiple_and_bring_values_back(rows, alignment):
    width = max(sum(gap + length for gap, length in row) for row in rows)
    seq_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for b, row in enumerate(rows):
        column = 0
        for number, (gap, length) in enumerate(row, start=1):
            seq_ids[b, column + gap : column + gap + length] = number
            column += gap + length
    values = torch.arange(1, seq_ids.numel() + 1).view_as(seq_ids)
    aligned = AlignedRows.of(seq_ids, alignment=alignment)
    spread, spread_ids = aligned.spread(values, fill=0), aligned.spread(seq_ids, fill=0)
    assert aligned.width % alignment == 0
    assert torch.equal(aligned.gather(spread), torch.where(seq_ids > 0, values, 0))
    for b, row in enumerate(rows):
        expected = 0
        for number, (_, length) in enumerate(row, start=1):
            columns = (spread_ids[b] == number).nonzero()[:, 0]
            assert columns.tolist() == list(range(expected, expected + length))
            assert torch.equal(spread[b, columns], values[b][seq_ids[b] == number])
            expected += length + -length % alignment
