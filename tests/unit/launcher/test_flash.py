"""The experiments at full size, held against the published totals; nothing of that size is made.

The released files are stood in for by files of the same names, shapes and sizes without content,
which take no room on the disk.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from launcher.problems import ConfigProblems
from launcher.run_config import RunConfig
from launcher.schema import Report, build
from launcher.validate import validate
from model.config import ModelConfig
from model.names import table_name
from model.released.audit import audit, unread_by
from model.released.check import model_shapes
from model.released.files import open_folder
from model.released.layout import Form, Shape, released_form, stored_tensors
from model.released.writer import Planned, Writer, shards

Composed = Callable[..., DictConfig]
NEEDS = ("data.paths=[x]", "model.weights=x")


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    folder = Path(__file__).parents[3] / "conf" / "model"
    report = Report()
    tree = OmegaConf.to_container(OmegaConf.load(folder / "flash.yaml"))
    model = build(ModelConfig, tree, report=report)
    assert not report
    return model


@pytest.fixture(scope="module")
def shapes(flash: ModelConfig) -> dict[str, Shape]:
    """Decoded shape by released name, as the model's own modules have them."""
    return model_shapes(flash, tables=True)


@pytest.fixture(scope="module")
def stored(shapes: dict[str, Shape]) -> list[Planned]:
    """Backbone, tables and vision as the released files hold them."""
    return [
        Planned(part, dtype, size)
        for name, shape in shapes.items()
        for part, (dtype, size) in stored_tensors(name, shape, released_form(name)).items()
    ]


@pytest.fixture(scope="module")
def draft(flash: ModelConfig) -> list[Planned]:
    """The draft's tensors: three window-only blocks of 128 experts, and seven more.

    Their names are stand-ins; their sizes are those that the published totals leave room for.
    """
    width, rank = flash.hidden_size, 256
    found = []
    for block in range(flash.num_nextn_predict_layers):
        inner = flash.moe_intermediate_size
        experts = {
            f"ffn.experts.{e}.{w}.weight": (width, inner) if w == "w2" else (inner, width)
            for e in range(128)
            for w in ("w1", "w2", "w3")
        }
        heads = flash.num_attention_heads
        others = {
            "attn_norm.weight": (width,),
            "ffn_norm.weight": (width,),
            "attn.wq_a.weight": (flash.q_lora_rank, width),
            "attn.wq_b.weight": (heads * flash.head_dim, flash.q_lora_rank),
            "attn.wkv.weight": (flash.head_dim, width),
            "attn.wo_a.weight": (
                flash.o_groups * flash.o_lora_rank,
                heads * flash.head_dim // flash.o_groups,
            ),
            "attn.wo_b.weight": (width, flash.o_groups * flash.o_lora_rank),
            "attn.q_norm.weight": (flash.q_lora_rank,),
            "attn.kv_norm.weight": (flash.head_dim,),
            "attn.attn_sink": (heads,),
            "ffn.gate.weight": (128, width),
            "ffn.gate.bias": (128,),
            "ffn.gate.bias_vl": (128,),
            "ffn.shared_experts.w1.weight": (inner, width),
            "ffn.shared_experts.w2.weight": (width, inner),
            "ffn.shared_experts.w3.weight": (inner, width),
        }
        mixes = flash.hc_mult * (flash.hc_mult + 2)
        for site in ("attn", "ffn"):
            others[f"hc_{site}_fn"] = (mixes, flash.hc_mult * width)
            others[f"hc_{site}_base"] = (mixes,)
            others[f"hc_{site}_scale"] = (3,)
        for name, shape in {**experts, **others}.items():
            full = f"mtp.{block}.{name}"
            parts = stored_tensors(full, shape, released_form(full))
            found += [Planned(part, dtype, size) for part, (dtype, size) in parts.items()]
    projection = stored_tensors("mtp.0.projection.weight", (width, 3 * width), Form.BLOCKS)
    found += [Planned(part, dtype, size) for part, (dtype, size) in projection.items()]
    markov = (flash.vocab_size, rank)
    for name, shape in {
        "mtp.0.projection_norm.weight": (width,),
        "mtp.2.norm.weight": (width,),
        "mtp.2.markov.w1.weight": markov,
        "mtp.2.markov.w2.weight": markov,
        "mtp.2.confidence.weight": (1, width + rank),
    }.items():
        found.append(Planned(name, "BF16", shape))
    return found


def test_names_and_bytes_are_the_published_ones(
    stored: list[Planned], draft: list[Planned]
) -> None:
    assert len(stored) == len({tensor.name for tensor in stored}) == 93_684
    assert len(draft) == len({tensor.name for tensor in draft}) == 2_401
    assert sum(t.size for t in [*stored, *draft]) == 510_286_023_000


def test_parameters_are_the_published_ones(shapes: dict[str, Shape]) -> None:
    def billions(chosen: Callable[[str], bool]) -> float:
        return round(sum(math.prod(s) for n, s in shapes.items() if chosen(n)) / 1e9, 2)

    seen = ("vision.", "aligner.", "image_")
    assert billions(lambda n: ".ffn.experts." in n) == 543.58
    assert billions(lambda n: "engram.embed" in n) == 196.61
    # The published figure counts neither the image tower nor the Engram modules.
    assert billions(lambda n: ".engram." not in n and not n.startswith(seen)) == 551.57


def test_every_form_of_storage_is_where_it_belongs(shapes: dict[str, Shape]) -> None:
    forms: dict[Form, set[str]] = {form: set() for form in Form}
    for name in shapes:
        if name.startswith("layers.20.") and ".experts." not in name:
            forms[released_form(name)].add(name.removeprefix("layers.20."))
    assert forms[Form.FP4] == set() and forms[Form.ROWS] == set()
    dense = "wq_a wq_b wkv wo_a wo_b indexer.wq_b"
    shared = {f"ffn.shared_experts.{w}.weight" for w in ("w1", "w2", "w3")}
    assert forms[Form.BLOCKS] == {f"attn.{n}.weight" for n in dense.split()} | shared
    mixes = {f"hc_{site}_{kind}" for site in ("attn", "ffn") for kind in ("fn", "base", "scale")}
    assert forms[Form.FP32] == mixes | {"attn.attn_sink", "ffn.gate.bias", "ffn.gate.bias_vl"}
    assert forms[Form.BF16] == {
        "attn_norm.weight",
        "ffn_norm.weight",
        "attn.q_norm.weight",
        "attn.kv_norm.weight",
        "attn.compressor.wkv.weight",  # ratio 1: no gate
        "attn.compressor.norm.weight",
        "attn.indexer.weights_proj.weight",
        "attn.indexer.wk.weight",
        "attn.indexer.k_norm.weight",
        "ffn.gate.weight",
    }
    assert released_form(table_name(14)) is Form.ROWS
    assert released_form("layers.14.engram.wkv.weight") is Form.BLOCKS
    assert released_form("layers.14.engram.q_weight") is Form.BF16
    assert released_form("layers.0.ffn.experts.383.w2.weight") is Form.FP4
    assert released_form("vision.blocks.3.attn.wqkv.weight") is Form.BF16


@pytest.fixture(scope="module")
def files(
    flash: ModelConfig,
    stored: list[Planned],
    draft: list[Planned],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """All released tensors in shards without content; the first row of each table is not zero."""
    folder = tmp_path_factory.mktemp("flash")
    every = [*stored, *draft]
    writer = Writer(folder, shards(every, largest=7_050_000_000))
    for layer in flash.engram_layers:
        name = table_name(layer)
        one = torch.full((1, flash.engram_head_dim), 0x38, dtype=torch.uint8)
        writer.rows(name, 0, one.view(torch.float8_e4m3fn))
        scale = torch.full((1, flash.engram_head_dim // 32), 127, dtype=torch.uint8)
        writer.rows(name.replace("weight", "scale"), 0, scale.view(torch.float8_e8m0fnu))
    writer.close()
    (folder / "config.json").write_text(json.dumps(flash.to_released()))
    return folder


def test_files_of_the_released_size_are_indexed(files: Path) -> None:
    folder = open_folder(files)
    assert folder.problems == []
    assert len(folder.files) == 48
    assert len(folder.tensors) == 96_085
    assert sum(s.size for s in folder.tensors.values()) == 510_286_023_000
    assert sum(f.stat().st_blocks * 512 for f in files.iterdir()) < 100_000_000


def refused(composed: Composed, *overrides: str) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        validate(composed(*overrides), environ={})
    return caught.value.problems


def test_fine_tuning_lacks_nothing_but_accelerators(
    composed: Composed, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    words = ("+experiment=flash_sft", f"data.paths=[{tmp_path}]", f"model.weights={files}")
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20)  # 1 TB
    (told,) = refused(composed, *words)
    assert told.startswith("parallel.dp_replicate=1 x parallel.dp_shard=64 x parallel.cp=4 is")


def test_one_wrong_name_among_96085_is_told(
    files: Path, shapes: dict[str, Shape], flash: ModelConfig
) -> None:
    folder = open_folder(files)
    name = "layers.7.attn.wkv.scale"
    folder.tensors["layers.7.attn.wkv.skale"] = folder.tensors.pop(name)
    assert audit(folder, shapes, unread=unread_by(flash, tables=True)) == [
        f"layers.7.attn.wkv.weight is {Form.BLOCKS.value}, but {name} is missing",
        "layers.7.attn.wkv.skale belongs to no part of this model",
    ]


def test_pretraining_lacks_accelerators_and_memory(
    composed: Composed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 17)  # 17 GB, and one rank takes 66
    found = refused(composed, "+experiment=flash_pretrain", f"data.paths=[{tmp_path}]")
    assert len(found) == 2
    assert found[0].startswith(
        "parallel.dp_replicate=1 x parallel.dp_shard=64 x parallel.cp=8 is a mesh of 512 ranks"
    )
    assert "741.5 B weights need at least 66 GB here" in found[1]


@pytest.mark.parametrize("name", ["flash_sft", "flash_pretrain"])
def test_both_are_the_released_model(composed: Composed, flash: ModelConfig, name: str) -> None:
    cfg = composed(f"+experiment={name}", *NEEDS)
    report = Report()
    config = build(RunConfig, OmegaConf.to_container(cfg, resolve=True), report=report)
    assert not report
    assert config.model.to_released() == flash.to_released()
    tokens = config.train.packs_per_step * config.data.pack_length
    assert config.parallel.world == {"flash_pretrain": 512, "flash_sft": 256}[name]
    assert config.problems() == []
    if name == "flash_pretrain":
        assert round(tokens / 1e6, 1) == 100.7
        assert round(tokens * config.train.steps / 1e12) == 45
    else:
        assert not config.indexer.distills(config.model)
