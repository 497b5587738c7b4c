"""Conversations with images from files to a prepared set, whatever the files are."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.cache.prepare import prepare
from data.cache.prepared import PreparedSet
from data.errors import DataError
from model.config import ModelConfig, VisionConfig

VISION = VisionConfig(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=8,
    patch_size=4,
    max_image_tokens=64,
    min_pixels=100,
)
SIZES = [(12, 12), (30, 12), (25, 40), (1, 1)]


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", SIZES[number % 4], (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


def record(number: int, images: list) -> dict:
    messages = [
        {"role": "user", "content": "<image>" * len(images) + f"Number {number}?"},
        {"role": "assistant", "content": "Yes. " * (number % 3 + 1)},
    ]
    return {"messages": messages, "images": images}


@pytest.fixture
def model(make_model: Callable[..., ModelConfig]) -> ModelConfig:
    return make_model(vision=VISION, image_token_id=3)


@pytest.fixture
def prepared(make_data: Callable, model: ModelConfig, chat_tokenizer: Path, tmp_path: Path):
    def make(**settings) -> PreparedSet:
        data = make_data(
            kind="image_chat",
            tokenizer=str(chat_tokenizer),
            cache_dir=str(tmp_path / "cache"),
            processes=1,
            **settings,
        )
        return prepare(data, model, say=lambda text: None)[0].set

    return make


def test_paths_and_bytes_give_the_same_documents(prepared, write_jsonl, tmp_path: Path) -> None:
    blobs = [[png(n), png(n + 1)][: n % 3] for n in range(9)]
    for number, blob in enumerate(b for some in blobs for b in some):
        (tmp_path / f"{number}.png").write_bytes(blob)
    names = iter(range(99))
    lines = [record(n, [f"{next(names)}.png" for _ in some]) for n, some in enumerate(blobs)]
    by_path = prepared(
        source="jsonl", paths=(str(write_jsonl(*lines)),), image_folder=str(tmp_path)
    )
    rows = [record(n, [{"bytes": b, "path": "x"} for b in some]) for n, some in enumerate(blobs)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    by_bytes = prepared(source="parquet", paths=(str(tmp_path / "a.parquet"),))
    assert np.array_equal(by_path.tokens(0), by_bytes.tokens(0))
    assert np.array_equal(by_path.image_spans(0), by_bytes.image_spans(0))
    assert np.array_equal(by_path.blobs(0), by_bytes.blobs(0))

    spans, tokens = by_path.image_spans(0), by_path.tokens(0)
    labelled, offsets = by_path.labelled(0), by_path.offsets(0)
    assert labelled is not None
    assert np.bincount(spans["document"], minlength=9).tolist() == [n % 3 for n in range(9)]
    inside = np.zeros(len(tokens), bool)
    for span in spans:
        start = offsets[span["document"]] + span["offset"]
        inside[start : start + span["rows"] * (span["cols"] + 1) + 2] = True
    assert np.array_equal(inside, tokens == 3)
    assert not labelled[inside].any() and labelled.any()
    whole = b"".join(b for some in blobs for b in some)
    assert by_path.blobs(0).tobytes() == whole


def test_bad_images_are_named_by_file_and_line(prepared, write_jsonl, tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(png(0))
    (tmp_path / "cut.png").write_bytes(png(2)[:60])
    lines = [record(n, ["good.png"]) for n in range(7)]
    lines[4] = record(4, ["good.png", "cut.png"])
    lines[6] = record(6, ["none.png"])
    with pytest.raises(DataError) as caught:
        prepared(source="jsonl", paths=(str(write_jsonl(*lines)),), image_folder=str(tmp_path))
    told = str(caught.value)
    assert "corpus.jsonl:5: message 1 (user): image 2 (cut.png): no readable image" in told
    assert "corpus.jsonl:7: message 1 (user): image 1 (none.png)" in told
    assert "none.png cannot be read (No such file or directory)" in told
    assert not list((tmp_path / "cache").glob("*/set.json"))


def test_other_sizing_is_another_set(
    prepared, make_data, make_model, write_jsonl, tmp_path: Path, chat_tokenizer: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    path = str(write_jsonl(record(0, ["a.png"])))
    first = prepared(source="jsonl", paths=(path,), image_folder=str(tmp_path))
    again = prepared(source="jsonl", paths=(path,), image_folder=str(tmp_path))
    assert first.folder == again.folder
    coarse = VisionConfig(**(vars(VISION) | {"patch_size": 8}))
    data = make_data(
        source="jsonl",
        paths=(path,),
        kind="image_chat",
        image_folder=str(tmp_path),
        tokenizer=str(chat_tokenizer),
        cache_dir=str(tmp_path / "cache"),
        processes=1,
    )
    model = make_model(vision=coarse, image_token_id=3)
    other = prepare(data, model, say=lambda text: None)[0].set
    assert other.fingerprint != first.fingerprint
    assert len(other.tokens(0)) < len(first.tokens(0))
    assert json.loads((other.folder / "set.json").read_text())["settings"]["kind"] == "image_chat"
