"""Exported weights: the source's own bytes where nothing changed, nearest values elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from model.config import ModelConfig
from model.engram.owners import OwnerStore
from model.names import table_name
from model.released.audit import audit, unread_by
from model.released.check import model_shapes
from model.released.encode import Tally
from model.released.export import Format, Table, plan_export, write_export
from model.released.files import WeightsFolder, open_folder
from model.released.layout import Shape, released_form
from model.released.load import load_folder, tables_of, targets_of
from model.transformer import DeepseekV41

EXPERT = "layers.2.ffn.experts.3.w1.weight"
STACK = "layers.2.ffn.experts.w13"
DENSE = "layers.0.attn.wq_b.weight"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def silent(done: int, total: int) -> None:
    pass


@dataclass
class InMemory:
    """A saved model whose tensors are at hand."""

    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def load(self, name: str) -> Tensor:
        return self.tensors[name]


@pytest.fixture
def model(pristine) -> InMemory:
    """Model and tables, started from the released weights."""
    return started(pristine.path, pristine.config)


def started(path: Path, config: ModelConfig) -> InMemory:
    targets = [*targets_of(DeepseekV41(config)), *tables_of(OwnerStore(config, seed=None))]
    load_folder(path, targets, unread=unread_by(config, tables=True))
    return InMemory({t.name: t.tensor for t in targets})


def export(
    model: InMemory,
    to: Path,
    *,
    format: Format = "released",
    source: WeightsFolder | None = None,
    draft: bool = False,
    tables: dict[str, Table] | None = None,
    largest: int = 10**9,
) -> Tally:
    to.mkdir()
    plan = plan_export(
        model.shapes, tables or {}, format=format, source=source, draft=draft, largest=largest
    )
    tally = write_export(plan, model, tables or {}, to=to, progress=silent)
    assert plan.size == sum(s.size for s in open_folder(to).tensors.values())
    return tally


def contents(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    index = json.loads((path / INDEX).read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    return found


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_untouched_weights_come_back_file_for_file(pristine, model, tmp_path: Path) -> None:
    source = open_folder(pristine.path)
    tally = export(model, tmp_path / "out", source=source, draft=True)
    assert tally.kept == tally.blocks > 0 and tally.error == 0
    for number in (1, 2, 3):
        file = pristine.shard(number)
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    ours, theirs = (json.loads((p / INDEX).read_text()) for p in (tmp_path / "out", pristine.path))
    assert ours == theirs


def test_only_changed_blocks_change(pristine, model, tmp_path: Path) -> None:
    source = open_folder(pristine.path)
    model.tensors[STACK][3, 5, 40] += 0.5  # gate row 5, second group of 32 columns
    model.tensors[DENSE][70, 3] += 0.5  # third block of rows
    tally = export(model, tmp_path / "out", source=source, draft=True)
    assert tally.blocks - tally.kept == 2
    before, after = contents(pristine.path), contents(tmp_path / "out")
    changed = {n for n in before if not torch.equal(raw(before[n]), raw(after[n]))}
    assert changed <= {EXPERT, EXPERT.replace("weight", "scale"), DENSE} | {
        DENSE.replace("weight", "scale")
    }
    assert {EXPERT, DENSE} <= changed
    bytes_of = [t[EXPERT].view(torch.uint8) for t in (before, after)]
    rows, columns = (bytes_of[0] != bytes_of[1]).nonzero(as_tuple=True)
    assert rows.unique().tolist() == [5] and int(columns.min()) >= 16
    back = started(tmp_path / "out", pristine.config).tensors
    for name, tensor in model.tensors.items():
        wrong = (back[name] - tensor).abs().max()
        assert wrong <= 0.1 if name in (STACK, DENSE) else wrong == 0, name


def test_without_a_source_every_value_returns_and_then_every_byte(
    pristine, model, tmp_path: Path
) -> None:
    tally = export(model, tmp_path / "once")
    assert tally.kept == 0 and tally.error == 0
    wanted = model_shapes(pristine.config, tables=True)
    folder = open_folder(tmp_path / "once")
    assert audit(folder, wanted, unread=unread_by(pristine.config, tables=True)) == []
    assert not any(name.startswith("mtp.") for name in folder.tensors)
    back = started(tmp_path / "once", pristine.config)
    for name, tensor in model.tensors.items():
        assert torch.equal(back.tensors[name], tensor), name
    export(back, tmp_path / "twice")
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()


def test_trained_weights_are_rounded_to_the_nearest(pristine, model, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    for tensor in model.tensors.values():
        tensor += 0.02 * torch.randn(tensor.shape, generator=draw)
    tally = export(model, tmp_path / "out", source=open_folder(pristine.path))
    assert tally.kept == 0
    assert 0.01 < tally.error < 0.12  # FP8 has 3 bits of mantissa, FP4 one
    back = started(tmp_path / "out", pristine.config).tensors
    for name, tensor in model.tensors.items():
        error = float((back[name] - tensor).norm() / tensor.norm())
        limit = {"FP32": 0, "BF16": 2**-8, "BLOCKS": 0.05, "ROWS": 0.05, "FP4": 0.2}
        form = "FP4" if name.endswith((".w13", ".w2")) else released_form(name).name
        form = "BLOCKS" if "shared_experts" in name else form
        form = "FP32" if ".hc_" in name else form
        assert error <= limit[form], (name, error)


def test_a_plain_copy_holds_the_values(pristine, model, tmp_path: Path) -> None:
    source = open_folder(pristine.path)
    tally = export(model, tmp_path / "wide", format="float32", source=source)
    assert tally.blocks == 0
    found = contents(tmp_path / "wide")
    assert found.keys() == pristine.decoded.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, pristine.decoded[name]), name
    export(model, tmp_path / "narrow", format="bfloat16")
    for name, tensor in contents(tmp_path / "narrow").items():
        wide = ".hc_" in name or name.endswith(
            ("head.weight", "attn_sink", "gate.bias", "gate.bias_vl")
        )
        wide |= name.endswith(("compressor.wkv.weight", "compressor.wgate.weight"))
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
        assert torch.equal(tensor, pristine.decoded[name].to(tensor.dtype)), name


def test_shards_are_as_large_as_asked_for(pristine, model, tmp_path: Path) -> None:
    export(model, tmp_path / "out", largest=100_000)
    folder = open_folder(tmp_path / "out")
    assert len(folder.files) > 3
    count = len(folder.files)
    assert folder.files[0] == f"model-00001-of-{count:05d}.safetensors"
    for file in folder.files:
        mine = [s for s in folder.tensors.values() if s.file == file]
        assert sum(s.size for s in mine) <= 100_000 or len(mine) == 1
    assert contents(tmp_path / "out").keys() == folder.tensors.keys()


def test_tables_of_other_files_keep_their_bytes_or_are_encoded(
    pristine, model, tmp_path: Path
) -> None:
    source = open_folder(pristine.path)
    names = [table_name(n) for n in pristine.config.engram_layers]
    values = {name: model.tensors.pop(name) for name in names}

    def table(name: str, folder: WeightsFolder | None) -> Table:
        weight = values[name]
        return Table(tuple(weight.shape), lambda low, high: weight[low:high], folder)

    copied = {name: table(name, source) for name in names}
    export(model, tmp_path / "copied", source=source, draft=True, tables=copied)
    for number in (1, 2, 3):
        file = pristine.shard(number)
        assert (tmp_path / "copied" / file.name).read_bytes() == file.read_bytes()
    read = {name: table(name, None) for name in names}
    export(model, tmp_path / "read", tables=read)
    back = started(tmp_path / "read", pristine.config).tensors
    assert all(torch.equal(back[name], values[name]) for name in names)
    export(model, tmp_path / "plain", format="float32", tables=copied)
    plain = contents(tmp_path / "plain")
    assert all(torch.equal(plain[name], values[name]) for name in names)


@pytest.mark.parametrize("case", ["tiny_text", "tiny_image"])
def test_reference_weights_survive_a_plain_copy(golden_folder: Path, tmp_path, case: str) -> None:
    document = json.loads((golden_folder / case / "config.json").read_text())
    config = ModelConfig.from_released(document)
    export(started(golden_folder / case, config), tmp_path / "out", format="float32")
    found, expected = contents(tmp_path / "out"), load_file(golden_folder / case / SINGLE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_image_tower_is_stored_in_bfloat16(golden_folder: Path, tmp_path: Path) -> None:
    document = json.loads((golden_folder / "tiny_image" / "config.json").read_text())
    model = started(golden_folder / "tiny_image", ModelConfig.from_released(document))
    export(model, tmp_path / "out")
    found, expected = contents(tmp_path / "out"), load_file(golden_folder / "tiny_image" / SINGLE)
    seen = {n for n in expected if n.startswith(("vision.", "aligner.", "image_"))}
    assert len(seen) > 20
    for name in seen:
        assert torch.equal(found[name], expected[name].bfloat16()), name


@pytest.mark.parametrize("name", [STACK, "norm.weight"])
@pytest.mark.parametrize("format", ["released", "float32"])
def test_weights_that_are_no_numbers_are_refused(
    model, tmp_path: Path, name: str, format: Format
) -> None:
    model.tensors[name].view(-1)[7] = torch.nan
    released = "layers.2.ffn.experts.0.w1.weight" if name == STACK else name
    with pytest.raises(ValueError, match=f"{released}: NaN or infinity"):
        export(model, tmp_path / "out", format=format)
