"""A run's configuration from the words of a command that is not dsv41-train itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from launcher import compose
from launcher.rules import DATA_RULES, Rule
from launcher.run_config import RunConfig
from launcher.validate import validate

if TYPE_CHECKING:
    from omegaconf import DictConfig


def add_run_words(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that takes the words that start a run."""
    parser.add_argument("overrides", nargs="*", metavar="NAME=VALUE", help="as for dsv41-train")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own groups")
    parser.add_argument("--config-name", metavar="NAME", help=argparse.SUPPRESS)


def composed_run(
    overrides: Sequence[str],
    *,
    config_dir: str | None,
    config_name: str | None,
    rules: Sequence[Rule] = DATA_RULES,
    complete: Callable[[DictConfig], None] = lambda cfg: None,
) -> RunConfig:
    """What dsv41-train would run with these words. ConfigProblems lists all that is wrong.

    rules: those between settings that must hold; whether this machine could train it is not asked.
    complete: fills in what the command does not need and the words may leave out.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from launcher import help_text, hydra_launcher

    os.environ["HYDRA_FULL_ERROR"] = "1"
    OmegaConf.register_new_resolver("dsv41_help", help_text.render, replace=True)
    hydra_launcher.register()
    folder = [] if config_dir is None else [f"hydra.searchpath=[file://{_folder(config_dir)}]"]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            cfg = hydra_compose(config_name or compose.CONFIG_NAME, overrides=[*folder, *overrides])
    except Exception as error:
        args = argparse.Namespace(
            overrides=list(overrides),
            config_dir=None if config_dir is None else _folder(config_dir),
            config_name=config_name,
            multirun=False,
            help=False,
            cfg=None,
            info=None,
        )
        problems = compose.diagnose(args, error)
        if problems is None:
            raise
        raise problems from error
    complete(cfg)
    return validate(cfg, rules=rules)


def _folder(config_dir: str) -> str:
    return os.path.abspath(config_dir)
