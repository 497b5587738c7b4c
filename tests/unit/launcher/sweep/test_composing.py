"""Points that are composed together are those that Hydra composes one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import PreTrainedTokenizerFast

from data import tokenizer
from launcher.sweep.composing import Composer
from launcher.validate import examine
from tests.builders import SMALL_MODEL

Composed = Callable[..., DictConfig]


class Counted:
    """Hydra's loader, and how often it composed."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader, self.times = loader, 0

    def list_groups(self, name: str) -> list[str]:
        return self.loader.list_groups(name)

    def load_sweep_config(self, master: DictConfig, overrides: list[str]) -> DictConfig:
        self.times += 1
        return self.loader.load_sweep_config(master, overrides)


@pytest.fixture
def loaded(composed: Composed, tmp_path: Path) -> tuple[Counted, DictConfig]:
    """The loader, with a folder of a user's own, and the configuration of a sweep."""
    (tmp_path / "mine").mkdir()
    for name, steps in (("short", 5), ("long", 50)):
        text = f"# @package _global_\ntrain:\n  steps: {steps}\n"
        (tmp_path / "mine" / f"{name}.yaml").write_text(text)
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    words = [f"hydra.searchpath=[file://{tmp_path}]", "+experiment=tiny", "seed=1,2"]
    master = hydra.compose_config("config", words, run_mode=RunMode.MULTIRUN)
    return Counted(hydra.config_loader), master


@pytest.mark.parametrize(
    ("points", "times"),
    [
        (["seed=1 optim.lr=1e-3", "seed=2 optim.lr=3", "seed=3 optim.lr=2e5"], 1),
        (["name=a data.paths=[a.txt]", "name='b,c' data.paths=[b.txt,c.txt]"], 1),
        (["id=null", "id=x", "id='${name}'", "id=null"], 1),
        (["+a=1 ++b.c=2", "+a=x ++b.c=[1,2]", "+a=null ++b.c=true"], 1),
        (["optim=adamw optim.lr=1", "optim=pretrain optim.lr=1", "optim=adamw optim.lr=2"], 2),
        (["optim.lr=1 optim=adamw", "optim.lr=2 optim=adamw", "optim.lr=2 optim=pretrain"], 2),
        # Left to Hydra: what a value is set in, and by whom, is not seen by the names.
        (["+mine=short", "+mine=long", "+mine=short"], 3),
        (["seed=1 seed=2", "seed=3 seed=4"], 2),
        (["optim={lr:1}", "optim={lr:2}", "optim={final_lr:2}"], 3),
        (["~seed", "~seed name=a"], 2),
        (["hydra.job.name=a seed=1", "hydra.job.name=b seed=2"], 2),
        (["seed='${eval.every}' eval.every=1", "seed=3 eval.every=2"], 2),
    ],
)
def test_values_alone_are_not_composed_again(loaded, points: list[str], times: int) -> None:
    counted, master = loaded
    compose = Composer(counted, master)
    for point in points:
        overrides = ["+experiment=tiny", *point.split()]
        made = _own(compose(overrides))
        wanted = _own(counted.loader.load_sweep_config(master, overrides))
        assert OmegaConf.to_container(made) == OmegaConf.to_container(wanted), point
        made.train.steps = 99  # a point is its own
    assert counted.times == times


def test_a_wrong_name_is_refused_as_ever(loaded) -> None:
    counted, master = loaded
    compose = Composer(counted, master)
    for _ in range(2):
        with pytest.raises(ConfigCompositionException, match=r"Could not override 'optim\.lrr'"):
            compose(["+experiment=tiny", "optim.lrr=1"])


def test_points_read_the_tokenizer_once(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, master = loaded
    compose, read = Composer(counted, master), []
    for cache in (tokenizer._highest_id, tokenizer.load_tokenizer, tokenizer.load_token_map):
        cache.cache_clear()
    whole = PreTrainedTokenizerFast.get_vocab
    monkeypatch.setattr(
        PreTrainedTokenizerFast, "get_vocab", lambda self: read.append(self) or whole(self)
    )
    for number in range(20):
        overrides = ["+experiment=tiny", *SMALL_MODEL, f"seed={number}"]
        config, report = examine(_own(compose(overrides)), environ={})
        assert config is not None, report
        assert config.seed == number
    assert counted.times == 1
    assert len(read) <= 2  # for the highest id, and for Engram's map


def _own(cfg: DictConfig) -> DictConfig:
    """Without what Hydra notes of a point's overrides."""
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg
