"""The batch against a reconstruction token by token."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from data.batch import Batch, PackLayout, Stretch
from data.collate import collate
from data.documents import Document, ImagePiece
from data.errors import DataError
from data.images.pixels import open_image, patches
from data.images.sizing import plan_image
from data.images.spans import span_types
from data.packs import PackedSet, Place
from model.config import VisionConfig
from model.engram.hashing import hash_rows
from model.engram.token_map import compress

PAD, LENGTH = 2, 32
TINY_VISION = VisionConfig(patch_size=4, downsample_ratio=2, min_pixels=64, max_image_tokens=16)


def pieces_of(packs: PackedSet, place: Place) -> list[tuple[int, list[int], list[bool]]]:
    """(column, tokens, which may be predicted) of each piece of a pack."""
    tokens, mask = packs.tokens(place), packs.labelled(place)
    found = []
    for start, length, column in zip(*packs.pieces(place), strict=True):
        here = slice(int(start), int(start) + int(length))
        learnt = [True] * int(length) if mask is None else mask[here].tolist()
        found.append((int(column), tokens[here].tolist(), learnt))
    return found


def batch_of(packs: PackedSet, places) -> Batch:
    return collate(packs, places, sample_ids=tuple(range(len(places))))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(2, 70), min_size=1, max_size=20),
    st.lists(st.integers(-1, 30), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_batch_is_its_documents_and_padding(
    make_packs, random_documents, lengths, wanted, masked
):
    documents = random_documents(lengths)
    if masked:
        dice = np.random.default_rng(1)
        documents = [Document(d.tokens, dice.random(len(d.tokens)) < 0.5) for d in documents]
    packs = make_packs(documents, masked=masked)
    places = [None if i < 0 else packs.place(i) for i in wanted]
    batch = collate(packs, places, sample_ids=tuple(wanted))
    rows = len(places)
    ids = np.full((rows, LENGTH), PAD)
    labels = np.full((rows, LENGTH), -100)
    positions = np.zeros((rows, LENGTH), dtype=int)
    seqs = np.zeros((rows, LENGTH), dtype=int)
    layout = []
    for row, place in enumerate(places):
        pieces = [] if place is None else pieces_of(packs, place)
        for number, (column, tokens, learnt) in enumerate(pieces, start=1):
            for i, token in enumerate(tokens):
                ids[row, column + i] = token
                positions[row, column + i] = i
                seqs[row, column + i] = number
                if i + 1 < len(tokens) and learnt[i + 1]:
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
    assert batch.images is None
    assert batch.layout.cu_seqlens.dtype == batch.layout.cu_seqlens_padded.dtype == torch.int32
    assert batch.layout.cu_seqlens_padded.tolist() == [s for s, _ in layout] + [rows * LENGTH]
    assert batch.layout.cu_seqlens.tolist() == np.cumsum([0, *(n for _, n in layout)]).tolist()
    assert batch.layout.max_seqlen == max(n for _, n in layout)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(2, 70), min_size=1, max_size=20))
def test_engram_rows_are_those_of_each_document_alone(
    make_packs, random_documents, hasher, lengths
):
    packs = make_packs(random_documents(lengths))
    plans = packs.sources[0].plans
    places = [Place(0, 0, pack) for pack in range(plans.training_packs(0))]
    batch = batch_of(packs, places)
    assert batch.engram_rows.shape == (len(places), LENGTH, 2, 6)
    pad = hash_rows(hasher.geometry, np.array([hasher.pad_id]), pad_id=hasher.pad_id)[0]
    expected = np.broadcast_to(pad, batch.engram_rows.shape).copy()
    for row, place in enumerate(places):
        for column, tokens, _ in pieces_of(packs, place):
            compressed = compress(hasher.token_map, np.array(tokens))
            expected[row, column : column + len(tokens)] = hash_rows(
                hasher.geometry, compressed, pad_id=hasher.pad_id
            )
    np.testing.assert_array_equal(batch.engram_rows, expected)


def test_a_padding_row_has_no_label_and_no_token(make_packs, random_documents):
    batch = batch_of(make_packs(random_documents([5])), [None, None])
    assert batch.valid_tokens == batch.real_tokens == 0
    assert (batch.input_ids == PAD).all()
    assert batch.layout.cu_seqlens.tolist() == [0, 0, 0]
    assert batch.layout.cu_seqlens_padded.tolist() == [0, LENGTH, 2 * LENGTH]
    assert batch.layout.max_seqlen == 0


def test_changing_one_document_changes_nothing_of_another(make_packs, random_documents):
    documents = random_documents([9, 7, 5])
    other = Document((documents[0].tokens + 17) % 300 + 3)
    a, b = (
        batch_of(packs, [packs.place(0)])
        for packs in (make_packs(documents), make_packs([other, *documents[1:]]))
    )
    changed = a.seq_ids == 1
    assert (a.input_ids != b.input_ids)[changed].all()
    assert (a.engram_rows != b.engram_rows)[changed].any()
    for name in ("input_ids", "labels", "position_ids", "engram_rows"):
        assert torch.equal(getattr(a, name)[~changed], getattr(b, name)[~changed]), name


def test_a_model_without_engram_has_no_rows(make_packs, random_documents):
    packs = make_packs(random_documents([5]), hasher=None)
    assert batch_of(packs, [packs.place(0)]).engram_rows.shape[:3] == (1, LENGTH, 0)


def test_ids_past_the_tokenizer_are_refused(make_packs):
    packs = make_packs([Document(np.array([0, 447, 1], dtype=np.int32))])
    with pytest.raises(ValueError, match=r"447.*400"):
        batch_of(packs, [packs.place(0)])


def test_layout_of_documents_without_slots_between_them():
    layout = PackLayout.from_seq_ids(np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 0, 0, 0]]))
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 8]
    assert layout.cu_seqlens_padded.tolist() == [0, 3, 6, 7, 8, 12]
    assert layout.max_seqlen == 3


def png(width: int, height: int, *, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def illustrated(*sizes: tuple[int, int], before: int, after: int, seed: int) -> Document:
    """Some words, images of these sizes with one word between, some words."""
    tokens, images = list(range(10, 10 + before)), []
    learnt = [True] * before
    for number, (width, height) in enumerate(sizes):
        plan = plan_image(width, height, TINY_VISION)
        blob = png(width, height, seed=seed + number)
        size: dict[str, Any] = {"width": plan.width, "height": plan.height}
        images.append(ImagePiece(len(tokens), plan.rows, plan.cols, **size, blob=blob, origin="x"))
        tokens += [399] * plan.tokens + [9]
        learnt += [False] * plan.tokens + [True]
    tokens += range(50, 50 + after)
    learnt += [True] * after
    return Document(np.array(tokens, dtype=np.int32), np.array(learnt), tuple(images))


def test_images_come_in_the_order_of_their_spans(make_packs):
    documents = [
        illustrated((8, 8), (24, 8), before=3, after=2, seed=1),
        illustrated((8, 30), before=0, after=9, seed=3),
        Document(np.arange(20, 27, dtype=np.int32)),
        illustrated((40, 8), before=15, after=25, seed=4),  # longer than a pack
    ]
    packs = make_packs(documents, masked=True, vision=TINY_VISION)
    places = [packs.place(i) for i in range(packs.sources[0].plans.training_packs(0))]
    batch = batch_of(packs, places)
    assert batch.images is not None
    expected, grids = [], []
    blobs = {d.tokens.tobytes(): d for d in documents}
    assert len(blobs) == len(documents)
    starts = [tuple(at) for at in (batch.token_types == 0).nonzero().tolist()]
    for row, column in starts:
        number = int(batch.seq_ids[row, column])
        same = (batch.seq_ids[row] == number).nonzero().flatten()
        ids = batch.input_ids[row, same].numpy()
        offset = column - int(same[0])
        [(document, image)] = [
            (d, image)
            for d in documents
            for image in d.images
            for shift in (image.offset - offset,)
            if shift >= 0 and np.array_equal(d.tokens[shift : shift + len(ids)], ids)
        ]
        assert document.images
        pixels = open_image(image.blob, where="here")
        plan = plan_image(*pixels.size, TINY_VISION)
        expected.append(patches(pixels, plan, patch_size=4))
        grids.append((plan.patch_rows, plan.patch_cols))
        here = slice(column, column + plan.tokens)
        np.testing.assert_array_equal(
            batch.token_types[row, here], span_types(image.rows, image.cols)
        )
    assert len(starts) == 4
    torch.testing.assert_close(batch.images.patches, torch.cat(expected), rtol=0, atol=0)
    assert batch.images.grids.tolist() == [list(grid) for grid in grids]
    spans = batch.input_ids == 399
    assert ((batch.token_types >= 0) == spans).all()
    assert not (batch.labels == 399).any()
    pad_rows = batch.engram_rows[~spans & (batch.seq_ids == 0)][0]
    assert (batch.engram_rows[spans] == pad_rows).all()


def test_each_rank_decodes_its_own_images(make_packs, monkeypatch: pytest.MonkeyPatch):
    documents = [
        illustrated((8, 8), (24, 8), before=3, after=2, seed=1),
        illustrated((8, 30), before=0, after=9, seed=3),
        illustrated((16, 16), (8, 8), before=1, after=1, seed=5),
    ]
    packs = make_packs(documents, masked=True, vision=TINY_VISION)
    places = [packs.place(i) for i in range(packs.sources[0].plans.training_packs(0))]
    whole, opened = batch_of(packs, places).images, []
    monkeypatch.setattr(
        "data.images.packed.open_image",
        lambda blob, where: opened.append(blob) or open_image(blob, where=where),
    )
    assert whole is not None
    ends = whole.grids.prod(1).cumsum(0)
    parts = {}
    for rank in range(4):
        batch = collate(packs, places, sample_ids=(0,) * len(places), stretch=Stretch(rank, 4, 4))
        images = batch.images
        assert images is not None and images.ranks is not None
        assert torch.equal(images.grids, whole.grids)
        own = (images.ranks == rank).nonzero().flatten().tolist()
        sizes = whole.grids.prod(1)[own].tolist()
        parts |= dict(zip(own, images.patches.split(sizes) if own else (), strict=True))
        if not own:
            assert images.patches.shape == (0, 48)
    assert len(opened) == len(whole.grids) == 5
    for image, end in enumerate(ends.tolist()):
        patches = whole.patches[end - len(parts[image]) : end]
        assert torch.equal(parts[image], patches)


def test_a_broken_image_is_named_with_its_document(make_packs):
    document = illustrated((8, 8), before=3, after=2, seed=1)
    [image] = document.images
    broken = ImagePiece(
        **{name: getattr(image, name) for name in ("offset", "rows", "cols", "width", "height")},
        blob=image.blob[:40],
        origin="x",
    )
    packs = make_packs(
        [Document(document.tokens, document.labelled, (broken,))], masked=True, vision=TINY_VISION
    )
    with pytest.raises(DataError, match=r"made-up:1: no readable image"):
        batch_of(packs, [packs.place(0)])


def test_images_planned_for_another_model_are_refused(make_packs):
    document = illustrated((24, 24), before=3, after=2, seed=1)
    other = VisionConfig(patch_size=4, downsample_ratio=3, min_pixels=64, max_image_tokens=16)
    packs = make_packs([document], masked=True, vision=other)
    with pytest.raises(DataError, match=r"made-up:1: an image was prepared as .* for this model"):
        batch_of(packs, [packs.place(0)])
