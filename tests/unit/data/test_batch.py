"""The batch against a reconstruction token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch, PackLayout, collate
from data.corpus import PackedSet
from data.packing import plan_packs
from model.engram.hashing import hash_rows
from model.engram.token_map import compress

PAD, ALIGNMENT, LENGTH = 2, 4, 32


@pytest.fixture(scope="session")
def pack(hasher, random_documents):
    def make(lengths, *, seed: int = 0, hasher=hasher) -> PackedSet:
        tokens, offsets = random_documents(lengths, seed=seed)
        plan = plan_packs(offsets, np.arange(len(lengths)), pack_length=LENGTH, alignment=ALIGNMENT)
        return PackedSet(tokens, plan, LENGTH, PAD, hasher)

    return make


def pieces_of(packs: PackedSet, index: int) -> list[tuple[int, list[int]]]:
    """(column, tokens) of each piece of a pack."""
    plan = packs.plan
    return [
        (int(plan.columns[i]), packs.tokens[plan.starts[i] :][: plan.lengths[i]].tolist())
        for i in range(int(plan.pack_offsets[index]), int(plan.pack_offsets[index + 1]))
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(2, 70), min_size=1, max_size=20),
    st.lists(st.integers(-1, 30), min_size=1, max_size=4),
)
def test_a_batch_is_its_documents_and_padding(pack, lengths, wanted):
    packs = pack(lengths)
    indices = np.array([i if i < 0 else i % len(packs) for i in wanted])
    batch = collate(packs, indices, sample_ids=tuple(wanted))
    rows = len(indices)
    ids = np.full((rows, LENGTH), PAD)
    labels = np.full((rows, LENGTH), -100)
    positions = np.zeros((rows, LENGTH), dtype=int)
    seqs = np.zeros((rows, LENGTH), dtype=int)
    layout = []
    for row, index in enumerate(indices.tolist()):
        pieces = [] if index < 0 else pieces_of(packs, index)
        for number, (column, tokens) in enumerate(pieces, start=1):
            for i, token in enumerate(tokens):
                ids[row, column + i] = token
                positions[row, column + i] = i
                seqs[row, column + i] = number
                if i + 1 < len(tokens):
                    labels[row, column + i] = tokens[i + 1]
            layout.append((row * LENGTH + column, len(tokens)))
        if not pieces:
            layout.append((row * LENGTH, 0))
    np.testing.assert_array_equal(batch.input_ids, ids)
    np.testing.assert_array_equal(batch.labels, labels)
    np.testing.assert_array_equal(batch.position_ids, positions)
    np.testing.assert_array_equal(batch.seq_ids, seqs)
    assert batch.sample_ids == tuple(wanted)
    assert batch.valid_tokens == (labels != -100).sum()
    assert batch.real_tokens == sum(length for _, length in layout)
    for name in ("input_ids", "labels", "position_ids", "seq_ids", "engram_rows"):
        assert getattr(batch, name).dtype == torch.int64
    assert batch.token_types.dtype == torch.int8
    assert (batch.token_types == -1).all()
    assert batch.layout.cu_seqlens.dtype == batch.layout.cu_seqlens_padded.dtype == torch.int32
    assert batch.layout.cu_seqlens_padded.tolist() == [s for s, _ in layout] + [rows * LENGTH]
    assert batch.layout.cu_seqlens.tolist() == np.cumsum([0, *(n for _, n in layout)]).tolist()
    assert batch.layout.max_seqlen == max(n for _, n in layout)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(2, 70), min_size=1, max_size=20))
def test_engram_rows_are_those_of_each_document_alone(pack, hasher, lengths):
    packs = pack(lengths)
    batch = collate(packs, np.arange(len(packs)), sample_ids=tuple(range(len(packs))))
    assert batch.engram_rows.shape == (len(packs), LENGTH, 2, 6)
    pad = hash_rows(hasher.geometry, np.array([hasher.pad_id]), pad_id=hasher.pad_id)[0]
    expected = np.broadcast_to(pad, batch.engram_rows.shape).copy()
    for index in range(len(packs)):
        for column, tokens in pieces_of(packs, index):
            compressed = compress(hasher.token_map, np.array(tokens))
            expected[index, column : column + len(tokens)] = hash_rows(
                hasher.geometry, compressed, pad_id=hasher.pad_id
            )
    np.testing.assert_array_equal(batch.engram_rows, expected)


def test_a_padding_row_has_no_label_and_no_token(pack):
    batch = collate(pack([5]), np.array([-1, -1]), sample_ids=(-1, -1))
    assert batch.valid_tokens == batch.real_tokens == 0
    assert (batch.input_ids == PAD).all()
    assert batch.layout.cu_seqlens.tolist() == [0, 0, 0]
    assert batch.layout.cu_seqlens_padded.tolist() == [0, LENGTH, 2 * LENGTH]
    assert batch.layout.max_seqlen == 0


def test_changing_one_document_changes_nothing_of_another(pack):
    lengths = [9, 7, 5]
    one, two = pack(lengths), pack(lengths)
    two.tokens[:9] = (two.tokens[:9] + 17) % 300 + 3  # the first document
    a, b = (collate(p, np.array([0]), sample_ids=(0,)) for p in (one, two))
    changed = a.seq_ids == 1
    assert (a.input_ids != b.input_ids)[changed].all()
    assert (a.engram_rows != b.engram_rows)[changed].any()
    for name in ("input_ids", "labels", "position_ids", "engram_rows"):
        assert torch.equal(getattr(a, name)[~changed], getattr(b, name)[~changed]), name


def test_a_model_without_engram_has_no_rows(pack):
    batch = collate(pack([5], hasher=None), np.array([0]), sample_ids=(0,))
    assert batch.engram_rows.shape[:3] == (1, LENGTH, 0)


def test_ids_past_the_tokenizer_are_refused(pack):
    packs = pack([5])
    packs.tokens[0] = 447
    with pytest.raises(ValueError, match=r"447.*400"):
        collate(packs, np.array([0]), sample_ids=(0,))


def test_layout_of_documents_without_slots_between_them():
    layout = PackLayout.from_seq_ids(np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 0, 0, 0]]))
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 8]
    assert layout.cu_seqlens_padded.tolist() == [0, 3, 6, 7, 8, 12]
    assert layout.max_seqlen == 3


def test_a_batch_is_plain_data(pack):
    assert isinstance(collate(pack([5]), np.array([0]), sample_ids=(0,)), Batch)
