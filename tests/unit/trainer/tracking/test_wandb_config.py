"""logging.wandb and logging.tensorboard: rules, and which mode auto means."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from trainer.config import LoggingConfig
from trainer.tracking.config import WandbConfig
from trainer.tracking.wandb_sink import has_account


@pytest.mark.parametrize(
    ("asked", "environ", "account", "meant"),
    [
        ("disabled", {"WANDB_MODE": "online"}, True, "disabled"),
        ("online", {"WANDB_MODE": "offline"}, False, "online"),
        ("auto", {}, True, "online"),
        ("auto", {}, False, "offline"),
        ("auto", {"WANDB_MODE": "offline"}, True, "offline"),
        ("auto", {"WANDB_MODE": "online"}, False, "online"),
        ("auto", {"WANDB_MODE": "disabled"}, True, "disabled"),
        ("auto", {"WANDB_MODE": "nonsense"}, False, "offline"),
    ],
)
def test_the_mode(asked: str, environ: dict[str, str], account: bool, meant: str) -> None:
    config = WandbConfig(mode=asked)  # pyright: ignore[reportArgumentType]
    assert config.resolved(environ, account=account) == meant


def test_an_account_is_a_key_in_the_environment_or_in_netrc(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    environ = {"NETRC": str(file)}
    assert not has_account(environ)
    assert has_account({**environ, "WANDB_API_KEY": "k"})
    file.write_text("machine api.wandb.ai login user password k\n")
    assert has_account(environ)
    assert not has_account({**environ, "WANDB_BASE_URL": "https://wandb.example.org"})
    file.write_text("machine\n")
    assert not has_account(environ)


def test_all_broken_rules_are_listed() -> None:
    wandb = WandbConfig(project="a/b", tags=("",), init_timeout_s=0, finish_timeout_s=float("inf"))
    found = wandb.problems()
    assert [text.split("=")[0].split(":")[0] for text in found] == [
        "logging.wandb.project",
        "logging.wandb.tags",
        "logging.wandb.init_timeout_s",
        "logging.wandb.finish_timeout_s",
    ]
    assert WandbConfig().problems() == []


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="it is installed")
def test_tensorboard_without_its_package_is_refused_with_the_fix() -> None:
    (problem,) = LoggingConfig(tensorboard=True).problems()
    assert "pip install tensorboard" in problem
    assert LoggingConfig().problems() == []
