"""Conversations with images: where spans stand, what is learnt, what cannot be used."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.documents import Document
from data.images.spans import span_types
from data.kinds.chat import Chat
from data.kinds.image_chat import ImageChat
from model.config import VisionConfig

USER, ASSISTANT, END_THINK, IMAGE = 401, 402, 404, 3
VISION = VisionConfig(
    num_hidden_layers=1, patch_size=4, downsample_ratio=3, max_image_tokens=64, min_pixels=100
)


def png(width: int, height: int, colour: tuple[int, int, int] = (9, 8, 7)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


WIDE, SMALL = png(30, 12), png(12, 12)  # 1 x 3 and 1 x 1 tokens


@pytest.fixture(scope="module")
def kind(encoder) -> ImageChat:
    chat = Chat(encoder, "messages", "role", "content", all_labels=False)
    return ImageChat(chat, "images", "", VISION)


def talk(question, answer="Two cats.") -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encoded(kind: ImageChat, messages, images=None) -> Document:
    (document,) = kind.encode([{"messages": messages, "images": images}])
    assert isinstance(document, Document), document
    return document


def refused(kind: ImageChat, messages, images=None) -> str:
    (told,) = kind.encode([{"messages": messages, "images": images}])
    assert isinstance(told, str)
    return told


def test_spans_stand_where_their_placeholders_are(kind, encoder) -> None:
    found = encoded(kind, talk("See <image> and <image>. What?"), [WIDE, SMALL])
    see, and_, what, cats = encoder.encode(["See ", " and ", ". What?", "Two cats."])
    wide, small = (np.full(len(span_types(1, n)), IMAGE) for n in (3, 1))
    wanted = [0, USER, *see, *wide, *and_, *small, *what, ASSISTANT, END_THINK, *cats, 1]
    assert found.tokens.tolist() == wanted
    first, second = found.images
    assert (first.offset, first.rows, first.cols) == (2 + len(see), 1, 3)
    assert (first.width, first.height, first.blob) == (32, 12, WIDE)
    assert second.offset == first.offset + 6 + len(and_)
    assert (second.rows, second.cols, second.blob) == (1, 1, SMALL)
    assert second.origin == "message 1 (user): image 2"
    answer = len(wanted) - len(cats) - 1
    assert found.labelled is not None
    assert found.labelled.tolist() == [False] * answer + [True] * (len(cats) + 1)


def test_with_all_labels_no_image_token_is_learnt(encoder) -> None:
    chat = Chat(encoder, "messages", "role", "content", all_labels=True)
    found = encoded(ImageChat(chat, "images", "", VISION), talk("<image>What?"), [WIDE])
    assert found.labelled is not None
    assert found.labelled[1:].tolist() == (found.tokens != IMAGE).tolist()[1:]


def test_parts_say_the_same_as_placeholders(kind) -> None:
    text = encoded(kind, talk("See <image> and <image>. What?"), [WIDE, SMALL])
    parts = [
        {"type": "text", "text": "See ", "image": None},
        {"type": "image", "text": None, "image": {"bytes": WIDE, "path": "wide.png"}},
        {"type": "text", "text": " and "},
        {"type": "image"},
        {"type": "text", "text": ". What?"},
    ]
    other = encoded(kind, talk(parts), [SMALL])
    assert np.array_equal(other.tokens, text.tokens)
    assert [p.blob for p in other.images] == [WIDE, SMALL]
    assert [p.offset for p in other.images] == [p.offset for p in text.images]


def test_images_alone_text_alone_and_several_turns(kind) -> None:
    assert len(encoded(kind, talk("<image>"), SMALL).images) == 1
    assert encoded(kind, talk("Hello")).images == ()
    long = [*talk("<image>What?"), *talk("And <image>this?", "A dog.")]
    found = encoded(kind, long, [SMALL, WIDE])
    assert [p.blob for p in found.images] == [SMALL, WIDE]
    for piece in found.images:
        end = piece.offset + len(span_types(piece.rows, piece.cols))
        assert (found.tokens[piece.offset : end] == IMAGE).all()
        assert found.tokens[piece.offset - 1] != IMAGE and found.tokens[end] != IMAGE


def test_every_way_to_give_an_image(kind, tmp_path: Path) -> None:
    (tmp_path / "small.png").write_bytes(SMALL)
    at_home = ImageChat(kind.chat, "images", str(tmp_path), VISION)
    uri = "data:image/png;base64," + base64.b64encode(SMALL).decode()
    given = [SMALL, str(tmp_path / "small.png"), uri, {"bytes": SMALL, "path": None}]
    given += [{"path": str(tmp_path / "small.png")}, "small.png"]
    for value in given:
        assert encoded(at_home, talk("<image>"), [value]).images[0].blob == SMALL
    picture = Image.new("RGBA", (12, 12), (9, 8, 7, 255))
    blob = encoded(kind, talk("<image>"), [picture]).images[0].blob
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(blob))), np.full((12, 12, 3), [9, 8, 7]))


@pytest.mark.parametrize(
    ("messages", "images", "words"),
    [
        (talk("<image> <image>"), [SMALL], ["at least 2 placeholder", "holds 1", "'images'"]),
        (talk("<image>"), [SMALL, SMALL], ["have 1 placeholder", "holds 2"]),
        (talk("What?"), [SMALL], ["have 0 placeholder", "holds 1"]),
        (talk("<image>"), None, ["at least 1 placeholder", "holds 0"]),
        (talk("What?", "<image>"), [SMALL], ["message 2 (assistant)", "only the user"]),
        (talk("  "), None, ["message 1 (user)", "empty"]),
        (talk(None), None, ["message 1 (user)", "NoneType"]),
        (talk([{"type": "video"}]), None, ["part 1", '{"type": "image"}']),
        (talk(["text"]), None, ["part 1"]),
        (talk([{"type": "text", "text": ""}]), None, ["part 1", "empty"]),
        (talk("<image> <｜User｜>"), [SMALL], ["message 1 (user)", "mark of the chat form"]),
        (talk("<image>"), [b"no image"], ["message 1 (user): image 1", "no readable image"]),
        (talk("<image>"), [png(64, 64)[:100]], ["no readable image"]),
        (talk("<image>"), ["https://x.org/a.png"], ["address", "download"]),
        (talk("<image>"), ["a.png"], ["relative path 'a.png'", "data.image_folder"]),
        (talk("<image>"), ["/no/such.png"], ["/no/such.png", "No such file"]),
        (talk("<image>"), ["data:image/png;base64,@@"], ["data URI"]),
        (talk("<image>"), ["data:image/png,abc"], ["data URI", ";base64"]),
        (talk("<image>"), [7], ["a int", "path"]),
        (talk("<image>"), [{"url": "x"}], ['neither "bytes" nor "path"', "'url'"]),
        (talk("<image>"), [Image.new("RGB", (0, 0))], ["0 x 0 pixels"]),
        (talk("<image>"), [Image.new("F", (4, 4))], ["8 bits"]),
    ],
)
def test_what_cannot_be_used(kind, messages, images, words: list[str]) -> None:
    told = refused(kind, messages, images)
    for word in words:
        assert word in told


def test_a_bad_record_spoils_no_other(kind) -> None:
    records = [
        {"messages": talk("<image>One?"), "images": [SMALL]},
        {"messages": talk("<image>Two? </think>"), "images": [SMALL]},
        {"messages": talk("<image>Three?"), "images": [b""]},
        {"messages": talk("<image>Four?"), "images": [WIDE]},
    ]
    first, second, third, fourth = kind.encode(records)
    assert isinstance(second, str) and isinstance(third, str)
    for found, record in ((first, records[0]), (fourth, records[3])):
        assert isinstance(found, Document)
        (alone,) = kind.encode([record])
        assert isinstance(alone, Document)
        assert np.array_equal(found.tokens, alone.tokens)


def test_settings_decide_the_documents(kind) -> None:
    other = VisionConfig(num_hidden_layers=9, patch_size=8, max_image_tokens=64, min_pixels=100)
    kinds = [
        kind,
        ImageChat(kind.chat, "pictures", "", VISION),
        ImageChat(kind.chat, "images", "/x", VISION),
        ImageChat(kind.chat, "images", "", other),
    ]
    keys = [str(k.settings()) for k in kinds]
    assert len(set(keys)) == len(keys)
    deeper = VisionConfig(
        num_hidden_layers=5, patch_size=4, downsample_ratio=3, max_image_tokens=64, min_pixels=100
    )
    assert ImageChat(kind.chat, "images", "", deeper).settings() == kind.settings()
