"""Everything that cannot be used is listed, and what comes twice."""

import gzip
import json

import pytest

from data.cache import parallel
from data.cache.check import Check
from data.cache.prepare import recipes
from data.sources import jsonl, streams


@pytest.fixture
def check(make_data, model, tmp_path):
    """check(**settings): (lines, the Check); the source is what lies in tmp_path/in."""

    def run(processes=1, **settings):
        given = {"source": "jsonl", "paths": (str(tmp_path / "in"),), "cache_dir": str(tmp_path)}
        recipe = recipes(make_data(**(given | settings)), model)[0]
        checked = Check(recipe, pack_length=64, processes=processes)
        found = list(checked.lines(lambda source, done, total: None))
        return [line.removeprefix(f"{tmp_path}/in/") for line in found], checked

    (tmp_path / "in").mkdir()
    return run


@pytest.fixture
def write(tmp_path):
    def written(name, *lines, packed=False):
        raw = b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
        (tmp_path / "in" / name).write_bytes(gzip.compress(raw)[:-6] if packed else raw)

    return written


def test_all_is_listed_with_file_and_line(check, write, tmp_path):
    write("a.jsonl", {"text": "one"}, b"{", {"text": "two"}, {"body": "x"}, {"text": "one"})
    write("b.jsonl", {"text": "\n"}, {"text": "three"}, b'{"text": "\xff"}', {"text": "two"})
    found, checked = check()
    assert [line.split(": ")[0] for line in found] == [
        *["a.jsonl:2", "a.jsonl:4", "b.jsonl:1", "b.jsonl:3", "a.jsonl:5", "b.jsonl:4"]
    ]
    assert "not JSON" in found[0]
    assert f"the same document as {tmp_path}/in/a.jsonl:1; remove one" in found[4]
    assert (checked.documents, checked.duplicates) == (5, 2)
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_nothing_is_found_in_good_data(check, write):
    write("a.jsonl", *({"text": f"number {n}"} for n in range(50)))
    found, checked = check()
    assert (found, checked.documents) == ([], 50)


def test_a_broken_file_does_not_hide_the_next(check, write):
    write("a.jsonl.gz", *({"text": f"number {n}"} for n in range(50)), packed=True)
    write("b.jsonl", {"text": "fine"}, b"[]")
    found, checked = check()
    assert [line.split(": ")[0] for line in found] == ["a.jsonl.gz", "b.jsonl:2"]
    assert "the gzip data ends too early" in found[0]
    assert "a JSON list, not an object" in found[1]
    assert checked.documents >= 1


def test_lengths_are_looked_at_when_they_are_refused(check, write):
    write("a.jsonl", {"text": "dog " * 30}, {"text": "dog"})
    assert check(max_document_length=20)[0] == []
    assert check(max_document_length=20, on_long_document="drop")[0] == []
    (line,), _ = check(max_document_length=20, on_long_document="refuse")
    assert line.startswith("a.jsonl:1: ")
    assert "more than data.max_document_length=20" in line


def test_pieces_of_one_document_are_no_duplicates(check, write):
    write("a.jsonl", {"text": "dog " * 100})
    assert check(max_document_length=5)[0] == []


def test_processes_do_not_show(check, write, monkeypatch):
    monkeypatch.setattr(parallel, "SMALL", 0)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 300)
    monkeypatch.setattr(streams, "CHUNK", 300)
    write("a.jsonl", *({"text": f"n {n % 97}"} if n % 31 else {} for n in range(300)))
    one, several = check()[0], check(processes=2)[0]
    assert one == several
    assert len(one) == 10 + 290 - 97
