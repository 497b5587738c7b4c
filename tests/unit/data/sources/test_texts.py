"""One document a file, and the texts that need no file."""

import gzip

import pytest

from data.sources import embedded, text
from data.sources.base import Finding


def test_embedded_is_the_help_topics_in_key_order(opened, walked, resumes_anywhere, monkeypatch):
    from pydoc_data.topics import topics

    source = opened()
    found = [record.value["text"] for record in walked(source)]
    assert found == [topics[key] for key in sorted(topics)]
    assert sum(map(len, found)) > 400_000
    monkeypatch.setattr(embedded, "BLOCK_BYTES", 50_000)
    assert resumes_anywhere(source) > 5
    assert source.files[0] == f"pydoc_data.topics[{min(topics)!r}]"


def test_text_files_are_one_document_each(opened, walked, resumes_anywhere, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes("\ufeffA".encode())
    (tmp_path / "b.txt").write_bytes(b"B\r\nb")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("Ä".encode()))
    source = opened(source="text", paths=(str(tmp_path),))
    assert [record.value["text"] for record in walked(source)] == ["A", "B\r\nb", "Ä"]
    monkeypatch.setattr(text, "BLOCK_BYTES", 5)
    assert resumes_anywhere(source) == 2


@pytest.mark.parametrize(
    ("raw", "line", "words"),
    [
        ("eins\nzwei\ndrei \xe9".encode("latin-1"), 3, "not UTF-8"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-4], 0, "ends too early"),
    ],
)
def test_files_that_are_no_text(opened, walked, tmp_path, raw, line, words):
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "b.txt").write_text("fine")
    bad, fine = walked(opened(source="text", paths=(str(tmp_path),)))
    assert isinstance(bad, Finding)
    assert (bad.file, bad.place) == (0, line)
    assert words in bad.problem
    assert str(tmp_path) not in bad.problem
    assert fine.value == {"text": "fine"}
