"""Tables out of a store, exported: copied from safetensors, encoded from GGUF or memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.engram.mapped import MappedStore
from model.engram.owners import OwnerStore
from model.engram.store import RowStore
from model.names import table_name
from model.quantization.released import decode_fp8_rows
from model.released.encode import Tally
from model.released.export import plan_export, write_export
from model.released.tables import store_tables


class NoModel:
    def __init__(self) -> None:
        self.shapes = {}

    def load(self, name: str) -> torch.Tensor:
        raise AssertionError(name)


def exported(store: RowStore, config, to: Path) -> tuple[dict[str, torch.Tensor], Tally]:
    to.mkdir()
    tables = store_tables(store, config)
    plan = plan_export({}, tables, format="released", source=None, draft=False, largest=1 << 30)
    tally = write_export(plan, NoModel(), tables, to=to, progress=lambda done, total: None)
    store.close()
    (file,) = to.glob("*.safetensors")
    return load_file(file), tally


def test_rows_of_gguf_are_encoded_anew(write_gguf: Callable, token_map, tmp_path: Path) -> None:
    files = write_gguf()
    config = files.read_by()
    found, tally = exported(MappedStore(config, token_map=token_map), config, tmp_path / "out")
    store = MappedStore(config, token_map=token_map)
    for index, layer in enumerate(config.engram_layers):
        name = table_name(layer)
        wanted = store.read_rows(index, torch.arange(store.rows[index]).numpy())
        rounded = decode_fp8_rows(found[name], found[name.replace("weight", "scale")])
        error = (rounded - wanted).norm() / wanted.norm()
        assert 0 < error < 0.04
        assert error == pytest.approx(tally.error, rel=0.1)
    store.close()
    assert tally.kept == 0


def test_released_rows_are_copied(write_tables: Callable, tmp_path: Path) -> None:
    files = write_tables("fp8")
    config = files.read_by()
    found, tally = exported(MappedStore(config, token_map=None), config, tmp_path / "out")
    assert tally.blocks == 0
    assert found.keys() == files.tensors.keys()
    for name, tensor in files.tensors.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_learnt_rows_are_encoded(make_config: Callable, tmp_path: Path) -> None:
    config = make_config()
    store = OwnerStore(config, seed=1)
    found, _ = exported(store, config, tmp_path / "out")
    name = table_name(config.engram_layers[0])
    rounded = decode_fp8_rows(found[name], found[name.replace("weight", "scale")])
    assert 0 < (rounded - store.weight[0]).norm() / store.weight[0].norm() < 0.04
