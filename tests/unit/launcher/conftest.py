"""Configurations composed from conf/, as the command line composes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from launcher import help_text, hydra_launcher
from launcher.run_config import RunConfig
from launcher.validate import validate

Composed = Callable[..., DictConfig]
GOLDEN_TOKENIZER = Path(__file__).parents[2] / "golden" / "tokenizer.json"


@pytest.fixture
def composed() -> Iterator[Composed]:
    """composed("a=1", "b=2"): the configuration that these overrides give."""
    OmegaConf.register_new_resolver("dsv41_help", help_text.render, replace=True)
    hydra_launcher.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        yield lambda *overrides: compose("config", overrides=list(overrides))


@pytest.fixture
def tiny(composed: Composed, tmp_path: Path) -> RunConfig:
    """The run of +experiment=tiny, below tmp_path."""
    return validate(composed("+experiment=tiny", f"runs_dir={tmp_path / 'runs'}"), environ={})
