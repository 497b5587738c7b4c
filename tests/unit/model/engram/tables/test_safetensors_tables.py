"""Tables out of safetensors files: exact values, few bytes touched, faults named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from model.engram.tables.file_rows import BadTableError, FileRows
from model.engram.tables.source import open_tables, table_problems
from model.engram.tables.table import sampled_rows

TABLE, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"


@pytest.mark.parametrize("form", ["fp8", "bfloat16", "float32"])
@pytest.mark.parametrize("dim", [16, 48])
def test_every_row_of_every_form_is_exact(write_tables: Callable, form: str, dim: int) -> None:
    """dim 48: a scale's last block is cut short."""
    files = write_tables(form, engram_head_dim=dim)
    tables = open_tables(files.read_by(), token_map=None)
    assert [t.rows for t in tables] == list(files.config.engram_num_embeddings)
    for layer, table in zip((1, 3), tables, strict=True):
        every = table.read(np.arange(table.rows))
        assert every.dtype == torch.float32
        assert torch.equal(every.double(), files.values(layer))
        few = np.array([0, 5, 6, table.rows - 1])
        assert torch.equal(table.read(few), every[few])


def test_a_bf16_model_gets_bf16_rows(write_tables: Callable) -> None:
    files = write_tables("fp8")
    table = open_tables(files.read_by(dtype="bfloat16"), token_map=None)[1]
    values = table.read(np.arange(table.rows))
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.double(), files.values(3))  # 4 bits and a power of two fit


def test_a_row_of_the_released_width_is_264_bytes(write_tables: Callable) -> None:
    files = write_tables("fp8", engram_head_dim=256)
    table = open_tables(files.read_by(), token_map=None)[0]
    assert sum(part.row_bytes for part in table.parts) == 264
    assert table.fingerprint()["bytes"] == 264 * table.rows


def test_shards_are_found_through_the_index(write_tables: Callable, write_file: Callable) -> None:
    files = write_tables("fp8")
    (files.path / "model.safetensors").unlink()
    shards = {"model-00001.safetensors": {}, "model-00002.safetensors": {}}
    for name, tensor in files.tensors.items():
        shards[f"model-0000{1 + name.endswith('scale')}.safetensors"][name] = tensor
    for name, tensors in shards.items():
        write_file(files.path / name, tensors)
    where = {n: shard for shard, tensors in shards.items() for n in tensors}
    where |= {"embed.weight": "model-00009.safetensors"}  # not fetched and not needed
    (files.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    tables = open_tables(files.read_by(), token_map=None)
    assert torch.equal(tables[1].read(np.arange(552)).double(), files.values(3))
    (files.path / "model-00002.safetensors").unlink()
    assert "model-00002.safetensors" in table_problems(files.read_by(), token_map=None)[0]


def test_a_model_with_fewer_layers_reads_the_first_tables(write_tables: Callable) -> None:
    files = write_tables("fp8")
    tables = open_tables(files.read_by(num_hidden_layers=3), token_map=None)
    assert [t.name for t in tables] == [TABLE]


def drop(*names: str) -> Callable:
    return lambda tensors: [tensors.pop(name) for name in names]


def shorten(name: str) -> Callable:
    return lambda tensors: tensors.update({name: tensors[name][:-1]})


def zero(tensors: dict) -> None:
    tensors[TABLE].view(torch.uint8).zero_()


def poison(tensors: dict) -> None:
    tensors[TABLE].view(torch.uint8)[-1, 3] = 127


@pytest.mark.parametrize(
    ("form", "change", "expected"),
    [
        ("fp8", drop(TABLE, SCALE), [f"{TABLE} is missing"]),
        ("fp8", drop(TABLE), [f"{TABLE} is missing"]),
        ("fp8", drop(SCALE), [f"but {SCALE} is missing"]),
        ("fp8", shorten(TABLE), [f"{TABLE} has shape [383, 16], not [384, 16]"]),
        ("fp8", shorten(SCALE), [f"{SCALE} has shape [383, 1], not [384, 1]"]),
        ("fp8", lambda t: t.update({SCALE: t[TABLE][:, :1]}), ["F8_E4M3, not F8_E8M0"]),
        ("fp8", zero, [f"{TABLE} holds only zeros"]),
        ("fp8", poison, [f"row 383 of {TABLE} holds values that are no finite numbers"]),
        ("float32", lambda t: t.update({SCALE: t[TABLE][:, :1]}), ["F32, which has no scale"]),
        (
            "fp8",
            lambda t: (shorten(TABLE)(t), drop("layers.3.engram.embed.scale")(t)),
            ["has shape [383, 16]", "layers.3.engram.embed.scale is missing"],
        ),
    ],
)
def test_faults_are_named_all_at_once(
    write_tables: Callable, form: str, change: Callable, expected: list[str]
) -> None:
    files = write_tables(form, change=change)
    found = table_problems(files.read_by(), token_map=None)
    for text in expected:
        assert any(text in problem for problem in found)
    for problem in found:
        assert problem.startswith(f"model.engram.path={files.path}: ")
    with pytest.raises(ValueError, match=r"model\.engram\.path"):
        open_tables(files.read_by(), token_map=None)


def test_files_that_are_no_tables_are_named(write_tables: Callable, tmp_path: Path) -> None:
    files = write_tables("fp8")
    config = files.read_by()
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for content, expected in (
        (whole[:-1], "model.safetensors is truncated"),
        (b"{}", "no safetensors file"),
        (whole[:8] + b"[" + whole[9:], "has a broken header"),
    ):
        file.write_bytes(content)
        assert any(expected in p for p in table_problems(config, token_map=None))
    file.unlink()
    assert "it holds neither" in table_problems(config, token_map=None)[0]
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert "holds no weight_map" in table_problems(config, token_map=None)[0]
    tmp_path.joinpath("model.safetensors.index.json").unlink()
    tmp_path.rmdir()
    assert "no such file or folder" in table_problems(config, token_map=None)[0]


def test_another_geometry_beside_the_tables_is_named(write_tables: Callable) -> None:
    files = write_tables("fp8")
    document = files.config.to_released()
    (files.path / "config.json").write_text(json.dumps(document))
    assert not table_problems(files.read_by(), token_map=None)
    document["text_config"]["engram_compressed_vocab_size"] = 324
    (files.path / "config.json").write_text(json.dumps(document))
    (problem,) = table_problems(files.read_by(), token_map=None)
    assert "engram_compressed_vocab_size=324, this model 323" in problem


def test_a_damaged_row_is_named_when_it_is_read(write_tables: Callable) -> None:
    row = 8
    assert row not in sampled_rows(384)
    files = write_tables(
        "fp8", change=lambda t: t[TABLE].view(torch.uint8)[row].copy_(torch.tensor(127))
    )
    table = open_tables(files.read_by(), token_map=None)[0]
    with pytest.raises(BadTableError, match=rf"row {row} of {TABLE} .* fetch it again"):
        table.read(np.arange(384))


def test_the_fingerprint_tells_sampled_rows_and_sizes(write_tables: Callable) -> None:
    files = write_tables("fp8")
    first, other = (t.fingerprint() for t in open_tables(files.read_by(), token_map=None))
    assert first["name"] == TABLE and first["sampled_rows"] != other["sampled_rows"]
    again = open_tables(write_tables("fp8").read_by(), token_map=None)[0].fingerprint()
    assert again == first
    changed = write_tables("fp8", change=lambda t: t[SCALE].view(torch.uint8)[383].add_(1))
    assert open_tables(changed.read_by(), token_map=None)[0].fingerprint() != first


def test_sampled_rows_spread_over_the_table() -> None:
    assert sampled_rows(1).tolist() == [0]
    assert sampled_rows(3).tolist() == [0, 1, 2]
    wide = sampled_rows(384_016_682)
    assert len(wide) == 256 and (np.diff(wide) > 1_000_000).all()
    assert (wide[0], wide[-1]) == (0, 384_016_681)


def test_rows_behind_an_odd_offset_and_a_file_that_fails(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (9000, 24), dtype=np.uint8)
    path = tmp_path / "rows"
    path.write_bytes(b"x" * 5001 + data.tobytes())
    rows = FileRows(path, offset=5001, rows=9000, row_bytes=24)
    for ids in (np.arange(9000), np.array([8999]), np.unique(np.arange(0, 9000, 7))):
        assert np.array_equal(rows.take(ids), data[ids])
    with path.open("r+b") as file:
        file.truncate(5001 + 8999 * 24 + 5)
    with pytest.raises(BadTableError, match="has become shorter"):
        rows.take(np.array([3, 8999]))
    with pytest.raises(ValueError, match="is cut short; fetch it again"):
        FileRows(path, offset=5001, rows=9000, row_bytes=24)
    rows.close()


SPARSE = """
import sys, numpy as np
from model.engram.tables.file_rows import BadTableError, FileRows
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

rows = FileRows(Path(sys.argv[1]), offset=4096, rows=384_000_000, row_bytes=256)
dice, before, most = np.random.default_rng(0), resident(), 0
for step in range(8):
    ids = np.unique(dice.integers(0, rows.rows, 6000))
    found = rows.take(ids)
    assert not found[:-1].any()
    most = max(most, resident() - before)
assert (rows.take(np.array([383_999_999])) == 7).all()
print(most)
"""


def test_a_sparse_table_of_384_million_rows_costs_no_memory(tmp_path: Path) -> None:
    """98 GB of file, 48,000 rows read in eight steps: nothing of it stays."""
    path = tmp_path / "table"
    with path.open("wb") as file:
        file.truncate(4096 + 384_000_000 * 256)
        file.seek(4096 + 383_999_999 * 256)
        file.write(b"\x07" * 256)
    done = subprocess.run(
        [sys.executable, "-c", SPARSE, str(path)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 12_000_000  # one step's rows are 1.5 MB; a page each were 25 MB
