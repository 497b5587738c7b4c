"""Tables out of GGUF files: Q2_K rows against the format's definition, and metadata checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model.engram.tables.gguf_tables import quick_reader
from model.engram.tables.source import open_tables, table_problems

TABLE = "blk.1.engram_embd.weight"


def decoded(row: np.ndarray) -> list[float]:
    """256 values of a Q2_K super-block, one by one: groups of 16 share a scale and a minimum."""
    scales, quants = row[:16].tolist(), row[16:80].tolist()
    d, low = (float(x) for x in row[80:].view(np.float16))
    out = []
    for i in range(256):
        half, within = divmod(i, 128)
        shift, place = divmod(within, 32)
        code = quants[32 * half + place] >> (2 * shift) & 3
        scale = scales[i // 16]
        out.append(d * (scale & 15) * code - low * (scale >> 4))
    return out


def test_every_row_is_a_super_block_of_84_bytes(
    write_gguf: Callable, token_map: np.ndarray
) -> None:
    files = write_gguf()
    tables = open_tables(files.read_by(), token_map=token_map)
    assert [part.row_bytes for t in tables for part in t.parts] == [84, 84]
    for layer, table in zip((1, 3), tables, strict=True):
        ids = np.array([0, 17, 200, table.rows - 1])
        raw = files.tensors[f"blk.{layer}.engram_embd.weight"].numpy()
        wanted = torch.tensor([decoded(raw[i]) for i in ids], dtype=torch.float64)
        torch.testing.assert_close(table.read(ids).double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_other_types_are_read_too(write_gguf: Callable, token_map: np.ndarray, kind: str) -> None:
    files = write_gguf(kind, engram_head_dim=32)
    table = open_tables(files.read_by(), token_map=token_map)[0]
    values = np.random.default_rng(1).normal(size=(384, 32))
    error = np.abs(table.read(np.arange(384)).numpy() - values).max()
    assert error < {"F32": 1e-6, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}[kind]


def test_a_split_set_is_read_from_any_of_its_files(
    write_gguf: Callable, token_map: np.ndarray, tmp_path: Path
) -> None:
    import gguf

    whole = write_gguf(name="m-00001-of-00002.gguf")
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "deepseek41")
    writer.add_tensor("output.weight", np.ones((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        files = type(whole)(whole.config, tmp_path / name, whole.tensors)
        assert len(open_tables(files.read_by(), token_map=token_map)) == 2
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    (problem,) = table_problems(whole.read_by(), token_map=token_map)
    assert "lacks m-00002-of-00002.gguf" in problem


def test_a_model_with_fewer_layers_reads_the_first_tables(
    write_gguf: Callable, token_map: np.ndarray
) -> None:
    files = write_gguf()
    (table,) = open_tables(files.read_by(num_hidden_layers=3), token_map=token_map)
    assert table.name == TABLE


def put(key: str, at: int, value: int) -> Callable:
    return lambda entries: entries[key].__setitem__(at, value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (put("multipliers", 3, 2**46 + 1), r"engram\.multipliers\[3\] is 70368744177665, this"),
        (put("primes", 11, 97), r"engram\.primes\[11\] is 97, this model's \d+: the table was"),
        (put("offsets", 1, 0), r"engram\.offsets\[1\] is 0"),
        (put("token_map", 399, 5), r"engram\.token_map\[399\] is 5"),
        (lambda e: e.update(token_map=e["token_map"][:-1]), "has 399 entries, this model 400"),
        (lambda e: e.update(pad_id=0), r"engram\.pad_id is 0, this model's 14"),
        (lambda e: e.update(head_count=4), r"engram\.head_count is 4, this model's 2"),
        (lambda e: e.update(key_length=128), r"engram\.key_length is 128"),
        (lambda e: e.update(max_ngram_size=3), r"engram\.max_ngram_size is 3, this model's 4"),
        (lambda e: e.update(layer_ids=[1, 2]), r"engram\.layer_ids\[1\] is 2, this model's 3"),
        (lambda e: (e.pop("primes"), e.pop("token_map")), r"lacks .*primes, \*.engram.token_map"),
    ],
)
def test_another_hash_is_refused_by_name(
    write_gguf: Callable, token_map: np.ndarray, keys: Callable, expected: str
) -> None:
    files = write_gguf(keys=keys)
    found = table_problems(files.read_by(), token_map=token_map)
    assert len(found) == 1 and re.search(expected, found[0]) and str(files.path) in found[0]


def test_without_a_tokenizer_the_rest_is_still_compared(write_gguf: Callable) -> None:
    files = write_gguf(keys=lambda e: (put("token_map", 0, 9)(e), put("primes", 0, 5)(e)))
    (problem,) = table_problems(files.read_by(), token_map=None)
    assert "primes[0]" in problem


def test_another_shape_and_broken_files_are_named(
    write_gguf: Callable, token_map: np.ndarray, tmp_path: Path
) -> None:
    files = write_gguf()
    wider = files.read_by(engram_head_dim=512)
    found = table_problems(wider, token_map=token_map)
    assert any("key_length is 256, this model's 512" in p for p in found)
    assert any(f"{TABLE} has shape [384, 256], not [384, 512]" in p for p in found)
    whole = files.path.read_bytes()
    for content in (whole[:5000], b"GGUF", b"not a gguf file at all"):
        files.path.write_bytes(content)
        (problem,) = table_problems(files.read_by(), token_map=token_map)
        assert "cannot be read as GGUF" in problem


def test_the_quick_reader_reads_what_the_packages_own_reads(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "deepseek41")
    kinds = gguf.GGUFValueType
    writer.add_array("tokens", ["a", "", "Ġlonger €", "b" * 300])
    writer.add_array("flags", [True, False])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_key_value("wide", [2**63, 1], kinds.ARRAY, kinds.UINT64)
    writer.add_key_value("nested", [[1, 2], [3]], kinds.ARRAY)
    writer.add_string("after", "the arrays")
    writer.add_tensor("one", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("two", np.zeros((3, 84), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    own, quick = gguf.GGUFReader(path), quick_reader()(path)
    assert quick.fields.keys() == own.fields.keys()
    for name in ("flags", "scores", "wide"):
        found = quick.fields[name]
        entries = np.concatenate([found.parts[i] for i in found.data])
        assert entries.tolist() == own.fields[name].contents()
    assert quick.fields["after"].contents() == "the arrays"
    for found, wanted in zip(quick.tensors, own.tensors, strict=True):
        assert (found.name, found.data_offset) == (wanted.name, wanted.data_offset)
        assert np.array_equal(found.data, wanted.data)
