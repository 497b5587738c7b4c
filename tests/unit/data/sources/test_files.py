"""Which files a source has, what identifies them, and how unusable ones are told."""

import os

import pytest

from data.errors import DataError
from data.sources import files
from data.sources.config import SourceConfig
from data.sources.files import mark_files
from data.sources.opening import source_files


def found(source: str, *paths) -> list[str]:
    config = SourceConfig(source=source, paths=tuple(map(str, paths)))
    return [path.name for path in source_files(config, name="data")]


def test_folders_globs_and_names_in_the_given_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.md", "d.txt.gz", "e[1].txt"):
        (tmp_path / name).write_text("x")
    one = tmp_path / "e[1].txt"
    assert found("text", tmp_path) == ["a.txt", "b.txt", "d.txt.gz", "e[1].txt"]
    assert found("text", tmp_path / "c.*", tmp_path / "*.txt") == [
        *["c.md", "a.txt", "b.txt", "e[1].txt"]
    ]
    assert found("text", one, tmp_path, one)[0] == "e[1].txt"
    assert len(found("text", one, tmp_path, one)) == 4


def test_all_missing_paths_come_at_once(tmp_path):
    (tmp_path / "here.jsonl").write_text("x")
    with pytest.raises(DataError) as raised:
        found("jsonl", tmp_path / "none.jsonl", tmp_path / "here.jsonl", tmp_path / "*.none")
    lines = str(raised.value).splitlines()
    assert [line.rsplit(": ")[-1] for line in lines[1:3]] == ["no such file, folder or match"] * 2
    assert lines[-1] == "Correct data.paths."
    with pytest.raises(DataError, match=r"the folder holds no \*\.parquet file; correct data\.pat"):
        found("parquet", tmp_path)


def test_all_unusable_files_come_at_once(tmp_path, monkeypatch):
    paths = [tmp_path / f"{i}.txt" for i in range(30)]
    for path in paths:
        path.write_text("x")
    paths[3].write_text("")
    paths[7].unlink()
    paths[9].unlink()
    paths[9].mkdir()
    with pytest.raises(DataError) as raised:
        mark_files(paths, setting="data.paths")
    text = str(raised.value)
    assert text.startswith("3 files or paths cannot be used:")
    assert f"{paths[3]}: the file is empty" in text
    assert f"{paths[7]}: cannot be read (No such file or directory)" in text
    assert f"{paths[9]}: cannot be read (Is a directory)" in text
    assert "leave them out of data.paths" in text
    for path in paths:
        path.unlink(missing_ok=True) if path.is_file() else None
    with pytest.raises(DataError, match="and 20 more") as raised:
        mark_files(paths, setting="data.paths")
    assert len(str(raised.value).splitlines()) == 13


def test_a_change_anywhere_in_a_small_file_shows(tmp_path):
    path = tmp_path / "a.txt"
    raw = bytearray(os.urandom(files.SAMPLES * files.SAMPLE_BYTES))
    path.write_bytes(raw)
    (before,) = mark_files([path], setting="")
    for place in (0, 70_001, len(raw) - 1):
        raw[place] ^= 1
        path.write_bytes(raw)
        (after,) = mark_files([path], setting="")
        assert after.sample != before.sample
        before = after


def test_the_ends_of_a_large_file_are_looked_at(tmp_path):
    path = tmp_path / "a.txt"
    size = 40 * files.SAMPLE_BYTES * files.SAMPLES
    with path.open("wb") as file:
        file.truncate(size)
    (empty,) = mark_files([path], setting="")
    for place in (0, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        (after,) = mark_files([path], setting="")
        assert after.sample != empty.sample
        empty = after
