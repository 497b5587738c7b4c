"""Rows of Parquet files and of Hugging Face datasets."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.errors import DataError
from data.sources import hf, parquet


def write_parquet(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return path


def texts(found):
    return [record.value["text"] for record in found]


def test_rows_of_the_needed_columns(opened, walked, tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["one", "two"], "junk": [1, 2]})
    write_parquet(tmp_path / "b.parquet", {"tools": ["x"], "text": [None]})
    source = opened(source="parquet", paths=(str(tmp_path),), optional=("tools",))
    assert [(r.value, r.file, r.place) for r in walked(source)] == [
        ({"text": "one"}, 0, 1),
        ({"text": "two"}, 0, 2),
        ({"text": None, "tools": "x"}, 1, 1),
    ]


def test_parquet_blocks_resume_anywhere(opened, walked, resumes_anywhere, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "BLOCK_BYTES", 200)
    written = [f"text {i} " * (i % 5 + 1) for i in range(100)]
    write_parquet(tmp_path / "a.parquet", {"text": written}, row_group_size=33)
    write_parquet(tmp_path / "b.parquet", {"text": written[:7]}, row_group_size=3)
    source = opened(source="parquet", paths=(str(tmp_path),))
    assert resumes_anywhere(source) > 10
    assert texts(walked(source)) == written + written[:7]


def test_all_files_of_another_schema_come_at_once(opened, tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["x"]})
    write_parquet(tmp_path / "b.parquet", {"body": ["x"], "n": [1]})
    (tmp_path / "c.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError) as raised:
        opened(source="parquet", paths=(str(tmp_path),))
    text = str(raised.value)
    assert "b.parquet: no column 'text' (columns here: body, n)" in text
    assert "c.parquet: no Parquet file" in text
    assert "a.parquet" not in text
    assert "data.fields" in text


def test_a_damaged_parquet_file_is_named(opened, walked, tmp_path):
    text = [f"{i**5}" for i in range(5000)]
    path = write_parquet(tmp_path / "a.parquet", {"text": text}, write_page_checksum=True)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    source = opened(source="parquet", paths=(str(path),))
    with pytest.raises(DataError, match=r"a\.parquet: damaged .*write or copy the file again"):
        walked(source)


def test_a_row_in_another_encoding_is_found_and_the_others_read(opened, walked, tmp_path):
    raw = pa.array([b"fine", b"\xff\xfe", b"more"]).view(pa.string())
    write_parquet(tmp_path / "a.parquet", {"text": raw})
    first, bad, last = walked(opened(source="parquet", paths=(str(tmp_path),)))
    assert (first.value, last.value) == ({"text": "fine"}, {"text": "more"})
    assert (bad.place, bad.problem) == (2, "not UTF-8 (invalid start byte); write the row anew")


@pytest.fixture(scope="module")
def dataset():
    import datasets

    return datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(300)], "n": [0] * 300})


def test_a_saved_dataset(opened, walked, resumes_anywhere, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "BLOCK_BYTES", 500)
    dataset.save_to_disk(tmp_path / "saved")
    source = opened(source="hf", paths=(str(tmp_path / "saved"),))
    found = walked(source)
    assert texts(found) == [f"text {i}" for i in range(300)]
    assert [r.place for r in found] == list(range(1, 301))
    assert "n" not in found[0].value
    assert resumes_anywhere(source) > 3
    again = opened(source="hf", paths=(str(tmp_path / "saved"),), streaming=True)
    assert texts(walked(again)) == texts(found)


def test_the_split_of_a_saved_dataset(opened, walked, dataset, tmp_path):
    import datasets

    both = datasets.DatasetDict({"train": dataset, "test": dataset.select(range(3))})
    both.save_to_disk(tmp_path / "saved")
    source = opened(source="hf", paths=(str(tmp_path / "saved"),), split="test")
    assert len(walked(source)) == 3
    with pytest.raises(DataError, match=r"no split 'dev'; set data\.split to one of train, test"):
        opened(source="hf", paths=(str(tmp_path / "saved"),), split="dev")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_that_the_library_finds(opened, walked, tmp_path, streaming, capfd, monkeypatch):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "published"
    folder.mkdir()
    lines = [json.dumps({"text": f"text {i}", "n": i}) for i in range(700)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    source = opened(source="hf", paths=(str(folder),), streaming=streaming)
    found = walked(source)
    assert texts(found) == [f"text {i}" for i in range(700)]
    assert (source.size is None) == streaming
    blocks = list(source.blocks())
    assert texts(walked(source, blocks[0].position)) == texts(found)[blocks[0].position :]
    assert (
        source.identity()
        == opened(source="hf", paths=(str(folder),), streaming=streaming).identity()
    )
    assert capfd.readouterr().err == ""


def test_a_dataset_that_is_not_there(opened, tmp_path, dataset):
    with pytest.raises(DataError, match=r"hf dataset .*nowhere cannot be read .*data\.paths"):
        opened(source="hf", paths=(str(tmp_path / "nowhere"),))
    dataset.save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"no column 'body' \(columns here: text, n\)"):
        opened(("body",), source="hf", paths=(str(tmp_path / "saved"),))
