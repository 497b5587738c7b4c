"""Lines of JSON, plain and compressed."""

import gzip
import json

import pytest
import zstandard

from data.errors import DataError
from data.sources import jsonl, streams
from data.sources.base import Finding, Record


def opened_file(opened, path):
    return opened(source="jsonl", paths=(str(path),))


def test_each_line_is_a_record_with_its_place(opened, walked, write_jsonl):
    path = write_jsonl({"text": "one", "n": 1}, {"body": "Ä"})
    assert walked(opened_file(opened, path)) == [
        Record({"text": "one", "n": 1}, 0, 1),
        Record({"body": "Ä"}, 0, 2),
    ]


def test_a_byte_order_mark_and_a_missing_last_newline(opened, walked, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}')
    assert [r.value["text"] for r in walked(opened_file(opened, path))] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "the line is empty"),
        (b"   ", "the line is empty"),
        (b'{"text": "a', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"text": "\xff"}', "not UTF-8 (invalid start byte at byte 10)"),
        (b'["text"]', "a JSON list, not an object"),
    ],
)
def test_bad_lines_are_found_and_the_others_read(opened, walked, write_jsonl, line, words):
    path = write_jsonl({"text": "fine"}, line, {"text": "more"})
    first, bad, last = walked(opened_file(opened, path))
    assert (first.place, last.place, last.value) == (1, 3, {"text": "more"})
    assert isinstance(bad, Finding)
    assert (bad.file, bad.place) == (0, 2)
    assert words in bad.problem
    assert len(bad.problem) < 200


def compressors():
    zstd = zstandard.ZstdCompressor()
    return {
        "plain": lambda raw: raw,
        "gzip": gzip.compress,
        "gzip in two members": lambda raw: gzip.compress(raw[:37]) + gzip.compress(raw[37:]),
        "gzip with padding": lambda raw: gzip.compress(raw) + bytes(512),
        "zstd": zstd.compress,
        "zstd in two frames": lambda raw: zstd.compress(raw[:90]) + zstd.compress(raw[90:]),
    }


@pytest.mark.parametrize("name", compressors())
def test_blocks_resume_anywhere(opened, walked, resumes_anywhere, tmp_path, monkeypatch, name):
    compress = compressors()[name]
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 64)
    monkeypatch.setattr(streams, "CHUNK", 80)
    for number in range(3):
        lines = [json.dumps({"text": "ä" * (i % 19), "i": i}) for i in range(20 * number + 1)]
        raw = ("\n".join(lines) + "\n" * (number % 2)).encode()
        (tmp_path / f"{number}.jsonl").write_bytes(compress(raw))
    source = opened(source="jsonl", paths=(str(tmp_path),))
    assert resumes_anywhere(source) > 10
    found = walked(source)
    places = [(record.file, record.place) for record in found]
    assert places == [(f, i + 1) for f in range(3) for i in range(20 * f + 1)]
    assert all(record.value["i"] == record.place - 1 for record in found)


def test_blocks_hold_few_records_where_each_brings_images(
    opened, walked, resumes_anywhere, tmp_path, monkeypatch
):
    """A block's images are all in memory at once."""
    lines = [json.dumps({"messages": [], "i": i}) for i in range(150)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    whole = opened(source="jsonl", paths=(str(tmp_path),))
    few = opened(source="jsonl", paths=(str(tmp_path),), kind="image_chat")
    assert walked(few) == walked(whole)
    assert resumes_anywhere(whole) == 1
    assert resumes_anywhere(few) == 3
    assert [len(list(few.read(block))) for block in few.blocks()] == [64, 64, 22]


@pytest.mark.parametrize("form", ["gzip", "zstd"])
@pytest.mark.parametrize(("damage", "words"), [("cut", "ends too early"), ("flip", "damaged")])
def test_damaged_compressed_files_are_named(opened, walked, tmp_path, form, damage, words):
    lines = b"".join(json.dumps({"text": str(i**7)}).encode() + b"\n" for i in range(5000))
    packed = bytearray(gzip.compress(lines) if form == "gzip" else _checked_zstd(lines))
    if damage == "cut":
        packed = packed[:-9]
    else:
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "a.jsonl.packed"
    path.write_bytes(packed)
    with pytest.raises(DataError, match=rf"a\.jsonl\.packed: .*{words}"):
        walked(opened_file(opened, path))


def _checked_zstd(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(raw)


def test_a_file_that_changes_or_vanishes_is_named(opened, walked, write_jsonl):
    path = write_jsonl({"text": "x"})
    source = opened_file(opened, path)
    path.write_text('{"text": "longer"}\n')
    with pytest.raises(DataError, match=r"corpus\.jsonl: changed while it was read"):
        walked(source)
    path.unlink()
    with pytest.raises(DataError, match=r"corpus\.jsonl: cannot be read \(No such file"):
        walked(source)


def test_an_endless_line_is_refused(opened, walked, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 100)
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 1000)
    monkeypatch.setattr(streams, "CHUNK", 64)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match=r"a\.jsonl: a line of more than 1,000 bytes"):
        walked(opened(source="jsonl", paths=(str(tmp_path),)))
