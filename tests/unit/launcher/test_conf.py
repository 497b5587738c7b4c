"""conf/: every option composes to a sound run, is complete, and explains itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

import conf
from launcher import help_text, rules
from launcher.run_config import RunConfig
from launcher.schema import Report, build, setting_names
from model.config import ModelConfig
from model.engram.hashing import HashGeometry

Composed = Callable[..., DictConfig]
HOME = Path(conf.__file__).parent
OPTIONS = sorted(p.relative_to(HOME) for p in HOME.glob("*/*.yaml"))
NEEDS = {name: ["data.paths=[x]"] for name in ("hf", "jsonl", "parquet", "text")}
NEEDS["flash_pretrain"] = ["data.paths=[x]"]
NEEDS["flash_sft"] = ["data.paths=[x]", "model.weights=x"]
NEEDS["mixture"] = ["data.mixture={a:{source:embedded,weight:1.0}}"]


def test_the_groups() -> None:
    assert {p.parent.name for p in OPTIONS} == {
        "experiment",
        "model",
        "data",
        "optim",
        "parallel",
        "launcher",
        "checkpoint",
        "cluster",
        "logging",
        "resilience",
        "sweep",
    }


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_gives_a_sound_run(composed: Composed, option: Path) -> None:
    group, name = option.parent.name, option.stem
    plus = "+" if group == "experiment" else ""
    base = [] if group == "experiment" else ["+experiment=tiny"]
    cfg = composed(*base, f"{plus}{group}={name}", *NEEDS.get(name, []))
    report = Report()
    build(RunConfig, OmegaConf.to_container(cfg, resolve=True), report=report)
    assert not report, report


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_explains_itself(option: Path) -> None:
    text = (HOME / option).read_text()
    assert len(help_text.first_comment(text)) > 5
    assert importlib.import_module(f"conf.{option.parent.name}").__doc__
    assert "_target_" not in text


def test_every_setting_can_be_overridden_without_a_plus(composed: Composed) -> None:
    cfg = composed("+experiment=tiny")
    # `carried` comes from a released config.json only.
    names = [n for n in setting_names(RunConfig) if n != "model.carried"]
    assert [n for n in names if OmegaConf.select(cfg, n, default="absent") == "absent"] == []


def test_flash_has_the_released_sizes(composed: Composed) -> None:
    tree = OmegaConf.to_container(composed("model=flash").model)
    report = Report()
    model = build(ModelConfig, tree, report=report)
    assert not report
    assert HashGeometry.from_config(model).rows_per_layer == (384006168, 384016682)
    assert model.compress_ratios == (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    width = model.hidden_size * model.moe_intermediate_size
    experts = model.num_hidden_layers * (model.n_routed_experts) * 3 * width
    assert round(experts / 1e9, 2) == 543.58
    tables = sum(model.engram_num_embeddings) * model.engram_head_dim
    assert round(tables / 1e9, 2) == 196.61


def test_tiny_tables_have_their_sizes(tiny: RunConfig) -> None:
    assert rules.tables_have_their_sizes(tiny.model) == []
    assert {tiny.model.role(n) for n in range(tiny.model.num_hidden_layers)} == {
        "window",
        "source",
        "reindex",
        "reuse",
    }


def test_hydra_keeps_out_of_the_users_folder(composed: Composed) -> None:
    from hydra import compose

    hydra = compose("config", overrides=["+experiment=tiny"], return_hydra_config=True).hydra
    assert hydra.output_subdir is None
    assert hydra.run.dir == hydra.sweep.dir == "."
    assert hydra.job_logging.root is None
    assert hydra.hydra_logging.root is None


def test_help_names_every_group_and_option(composed: Composed) -> None:
    text = help_text.render()
    for option in OPTIONS:
        assert f"\n  {option.parent.name} " in text
        assert f"\n    {option.stem} " in text
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= 64
