"""Folders of safetensors by their headers: where tensors lie, and what is wrong with files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.released.errors import WeightsError
from model.released.files import DTYPES, open_folder, read_header

INDEX = "model.safetensors.index.json"


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal in shape, dtype and bytes."""
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and torch.equal(
            found.flatten().view(torch.uint8), expected.contiguous().flatten().view(torch.uint8)
        )
    )


def test_every_tensor_of_every_shard_is_found_and_read(pristine) -> None:
    folder = open_folder(pristine.path)
    assert folder.problems == []
    expected = {}
    for number in (1, 2, 3):
        expected |= load_file(pristine.shard(number))
    assert folder.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(folder.read(name), tensor), name
    folder.close()
    assert same(folder.read("norm.weight"), expected["norm.weight"])


def test_rows_are_read_alone(pristine) -> None:
    folder = open_folder(pristine.path)
    for name in ("layers.1.engram.embed.weight", "layers.1.engram.embed.scale", "norm.weight"):
        whole = folder.read(name)
        assert same(folder.read(name, 7, 31), whole[7:31])
        assert same(folder.read(name, 60), whole[60:])
        assert folder.read(name, 3, 3).shape == (0, *whole.shape[1:])


def test_raw_bytes_come_in_pieces(pristine) -> None:
    folder = open_folder(pristine.path)
    whole = folder.read("head.weight").view(torch.uint8).flatten()
    pieces = list(folder.raw("head.weight", at_once=1000))
    assert [len(p) for p in pieces[:-1]] == [1000] * (len(whole) // 1000)
    assert torch.equal(torch.cat(pieces), whole)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    tensors = {
        name: torch.zeros(3, 2).to(dtype)
        for name, dtype in DTYPES.items()
        if dtype != torch.float8_e8m0fnu
    }
    tensors["scalar"], tensors["nothing"] = torch.tensor(4.0), torch.zeros(0, 5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = open_folder(tmp_path)
    assert folder.files == ["model.safetensors"]
    assert folder.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(folder.read(name), tensor), name


def test_a_cache_folder_means_its_snapshot(pristine, tmp_path: Path) -> None:
    """A Hugging Face cache: blobs, snapshots of links to them, and refs."""
    cache = tmp_path / "models--deepseek--v41"
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "abc123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(pristine.path.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(blobs / str(number))
    assert open_folder(cache).path == snapshot
    (cache / "snapshots" / "older").mkdir()
    with pytest.raises(WeightsError, match="2 snapshots and no refs/main"):
        open_folder(cache)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc123\n")
    folder = open_folder(cache)
    assert folder.path == snapshot and folder.problems == []
    assert same(folder.read("norm.weight"), open_folder(pristine.path).read("norm.weight"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: shutil.rmtree(p), "there is no such folder"),
        (lambda p: (p / INDEX).unlink(), f"{INDEX} is missing beside model-00001"),
        (lambda p: [f.unlink() for f in p.iterdir()], f"neither {INDEX} nor model.safetensors"),
        (lambda p: (p / INDEX).write_text("{"), f"{INDEX} is no JSON"),
        (lambda p: (p / INDEX).write_text("[]"), f"{INDEX} holds no JSON object"),
        (lambda p: (p / INDEX).write_text("{}"), f"{INDEX} holds no weight_map"),
    ],
)
def test_a_folder_without_weights(small, spoil: Callable[[Path], object], message: str) -> None:
    spoil(small.path)
    with pytest.raises(WeightsError, match=message) as caught:
        open_folder(small.path)
    assert str(small.path) in str(caught.value)


def test_truncated_and_lengthened_files_are_named(small) -> None:
    cut, longer, gone = (small.shard(n) for n in (1, 2, 3))
    size = cut.stat().st_size
    held = {f: len(read_header(f)) for f in (cut, longer, gone)}
    cut.write_bytes(cut.read_bytes()[:-1])
    longer.write_bytes(longer.read_bytes() + b"xyz")
    gone.unlink()
    folder = open_folder(small.path)
    assert folder.problems == [
        f"{cut.name} is truncated: it has {size - 1:,} bytes of {size:,} ({held[cut]} tensors)",
        f"{longer.name} has 3 bytes more than its header lists ({held[longer]} tensors)",
        f"{gone.name} is missing ({held[gone]} tensors)",
    ]
    assert folder.tensors == {} and len(folder.lost) == sum(held.values())


def test_index_and_files_that_disagree(small) -> None:
    norm = small.holder("norm.weight").name
    small.reindex(lambda weight_map: weight_map.update({"made.up": norm}))
    small.reindex(lambda weight_map: weight_map.pop("norm.weight"))
    folder = open_folder(small.path)
    assert folder.problems == [
        f"made.up is not in {norm}, where the index says it is",
        f"norm.weight in {norm} is not in the index",
    ]
    assert folder.lost == {"made.up"} and "norm.weight" not in folder.tensors


@settings(max_examples=60)
@given(cut=st.integers(0, 2000))
def test_a_file_cut_anywhere_is_refused(pristine, tmp_path_factory, cut: int) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.safetensors"
    file.write_bytes(pristine.shard(1).read_bytes()[:cut])
    with pytest.raises(ValueError, match="truncated"):
        read_header(file)


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(dtype="F3")}, "unknown dtype F3"),
        ({"a": entry(shape=[2, 3])}, r"a has 16 bytes for F32 \[2, 3\]"),
        ({"a": entry(shape=[-2, -2])}, "no whole number"),
        ({"a": entry(data_offsets=[8, 24])}, "a does not begin where it should"),
        ({"a": entry(), "b": entry()}, "b does not begin where it should"),
        ({"a": entry(data_offsets=[0])}, "broken header"),
        ({"a": []}, "broken header"),
        ([], "broken header"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, header: object, message: str) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match=message):
        read_header(file)


def test_a_file_that_shrinks_under_a_reader(small) -> None:
    folder = open_folder(small.path)
    file = small.holder("head.weight")
    file.write_bytes(file.read_bytes()[: folder.tensors["head.weight"].start + 8])
    with pytest.raises(WeightsError, match=f"{file.name} has become shorter"):
        folder.read("head.weight")
