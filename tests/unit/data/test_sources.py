"""What is read, in which order, and how bad input is named."""

import json

import pytest

from data.errors import DataError
from data.sources import open_source, source_files


def texts(config) -> list[str]:
    return [document.text for document in open_source(config).documents]


def test_embedded_is_the_help_topics_in_key_order(make_data):
    from pydoc_data.topics import topics

    found = texts(make_data())
    assert found == [topics[key] for key in sorted(topics)]
    assert sum(map(len, found)) > 400_000


def test_jsonl_takes_one_field_of_each_line(make_data, write_jsonl):
    path = write_jsonl({"text": "one", "body": "Ä"}, {"body": "two\n", "n": 1})
    assert texts(make_data(source="jsonl", paths=(str(path),), text_field="body")) == ["Ä", "two\n"]


def test_jsonl_may_begin_with_a_byte_order_mark_and_end_without_newline(make_data, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}')
    assert texts(make_data(source="jsonl", paths=(str(path),))) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["the line is empty"]),
        ("   ", ["the line is empty"]),
        ('{"text": "a', ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        (b'{"text": "\xff"}', ["not UTF-8"]),
        (["text"], ["a JSON list, not an object"]),
        ({"body": "x", "n": 2}, ["no field 'text'", "'body', 'n'"]),
        ({}, ["no field 'text'", "none"]),
        ({"text": None}, ["NoneType"]),
        ({"text": 3}, ["a int"]),
        ({"text": ""}, ["field 'text' is empty"]),
        ({"text": " \n"}, ["field 'text' is empty"]),
        ('{"text": "a\\ud800b"}', ["surrogate"]),
    ],
)
def test_bad_lines_are_named_by_file_and_line(make_data, write_jsonl, line, words):
    path = write_jsonl({"text": "fine"}, {"text": "\u00e9 \U0001f600"}, line, {"text": "more"})
    documents = open_source(make_data(source="jsonl", paths=(str(path),))).documents
    assert [next(documents).text, next(documents).text] == ["fine", "\u00e9 \U0001f600"]
    with pytest.raises(DataError) as raised:
        next(documents)
    message = str(raised.value)
    assert message.startswith(f"{path}:3: ")
    assert all(word in message for word in words)
    assert len(message) < 400


def test_an_empty_jsonl_file(make_data, write_jsonl):
    path = write_jsonl()
    with pytest.raises(DataError, match=r"corpus\.jsonl: the file is empty"):
        texts(make_data(source="jsonl", paths=(str(path),)))


def test_text_files_are_one_document_each(make_data, tmp_path):
    for name, text in [("b.txt", "B\r\nb"), ("a.txt", "\ufeffA"), ("c.md", "C")]:
        (tmp_path / name).write_bytes(text.encode())
    assert texts(make_data(source="text", paths=(str(tmp_path),))) == ["A", "B\r\nb"]
    pattern = (str(tmp_path / "c.*"), str(tmp_path / "*.txt"))
    assert texts(make_data(source="text", paths=pattern)) == ["C", "A", "B\r\nb"]


def test_a_file_named_twice_is_read_once(make_data, tmp_path):
    (tmp_path / "a[1].txt").write_text("A", encoding="utf-8")
    one = str(tmp_path / "a[1].txt")
    assert texts(make_data(source="text", paths=(one, str(tmp_path), one))) == ["A"]


@pytest.mark.parametrize(("raw", "words"), [(b"", "empty"), (b" \n", "empty")])
def test_text_files_without_text(make_data, tmp_path, raw, words):
    (tmp_path / "a.txt").write_bytes(raw)
    with pytest.raises(DataError, match=rf"a\.txt: .*{words}"):
        texts(make_data(source="text", paths=(str(tmp_path),)))


def test_a_text_file_in_another_encoding_is_named_by_line(make_data, tmp_path):
    (tmp_path / "a.txt").write_bytes("eins\nzwei\ndrei \xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:3: not UTF-8"):
        texts(make_data(source="text", paths=(str(tmp_path),)))


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_missing_files_are_named(make_data, tmp_path, source):
    for given in ("none.txt", "*.none", "folder/**/x"):
        with pytest.raises(DataError, match=r"correct data\.paths") as raised:
            open_source(make_data(source=source, paths=(str(tmp_path / given),)))
        assert str(tmp_path / given) in str(raised.value)
    with pytest.raises(DataError, match="the folder holds no"):
        source_files(make_data(source=source, paths=(str(tmp_path),)))


def test_a_file_that_vanishes_is_named(make_data, write_jsonl):
    path = write_jsonl({"text": "x"})
    source = open_source(make_data(source="jsonl", paths=(str(path),)))
    path.unlink()
    with pytest.raises(DataError, match=r"corpus\.jsonl: cannot be read \(No such file"):
        next(source.documents)


@pytest.mark.parametrize("source", ["embedded", "jsonl", "text"])
def test_progress_ends_at_the_size(make_data, tmp_path, source):
    (tmp_path / "a.txt").write_text("ä\nb", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ä"}) + "\n", encoding="utf-8")
    paths = () if source == "embedded" else (str(tmp_path),)
    found = open_source(make_data(source=source, paths=paths))
    assert [d.done for d in found.documents][-1] == found.size
